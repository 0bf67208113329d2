import copy
import os
import pickle
import warnings
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epsilons.noise import SecureNoise
from epsilons.noise.keystream import Keystream, poisson_draw

KEY = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")


class Coins:
    """A stream of given words, for a draw whose outcome is known."""

    def __init__(self, words):
        self._words = np.array(words, dtype=np.uint64)

    def words(self, count):
        assert count == len(self._words)
        return self._words


def test_bits_are_those_of_nist_sp_800_38a():
    # F.5.5, CTR-AES256.Encrypt: the stream is ciphertext ⊕ plaintext
    plain = bytes.fromhex(
        "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
        "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
    )
    cipher = bytes.fromhex(
        "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
        "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
    )
    counter = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
    position = 16 * int.from_bytes(counter[8:], "big")
    stream = Keystream(KEY, counter[:8], position=position)
    assert stream.read(64) == bytes(a ^ b for a, b in zip(plain, cipher, strict=True))


@given(position=st.integers(0, 500), counts=st.lists(st.integers(0, 60), max_size=5))
def test_seeking_and_reading_in_parts_give_the_bytes_of_one_long_read(position, counts):
    whole = Keystream(KEY, b"noise").read(1000)
    stream = Keystream(KEY, b"noise")
    stream.seek(position)
    parts = b"".join(stream.read(count) for count in counts)
    assert parts == whole[position : position + sum(counts)]
    assert stream.position == position + sum(counts)


def test_purposes_select_different_streams_of_one_key():
    purposes = [b"noise", b"sampling", b"n", b"\0n", b"noisf", b"\xff" * 8]
    stream = Keystream(KEY, b"other")
    starts = {stream.fork(purpose).read(16) for purpose in purposes}
    assert len(starts) == len(purposes)


@pytest.mark.parametrize("purpose", [b"", b"n\0", b"too long!"])
def test_a_purpose_that_could_share_its_nonce_is_refused(purpose):
    with pytest.raises(ValueError, match="purpose="):
        Keystream(KEY, purpose)


def test_a_fork_starts_a_stream_of_the_same_key():
    stream = Keystream(KEY, b"noise", position=99)
    assert stream.fork(b"sampling").read(32) == Keystream(KEY, b"sampling").read(32)
    assert Keystream.seeded(1, b"noise").fork(b"sampling").is_seeded


def test_a_fork_that_would_repeat_the_stream_is_refused():
    with pytest.raises(ValueError, match="would repeat"):
        Keystream(KEY, b"noise").fork(b"noise")


def test_a_seed_determines_the_stream_and_seeds_differ():
    starts = {Keystream.seeded(seed, b"noise").read(16) for seed in (0, 1, -1, 2**80)}
    assert len(starts) == 4
    assert Keystream.seeded(1, b"noise").read(16) in starts


def test_streams_from_the_operating_system_differ():
    assert Keystream.secret(b"noise").read(16) != Keystream.secret(b"noise").read(16)


@pytest.mark.parametrize("seed", [1.0, True, None, "1"])
def test_a_seed_that_is_no_integer_is_refused(seed):
    with pytest.raises(TypeError, match="must be an int"):
        Keystream.seeded(seed, b"noise")


def test_words_are_the_bytes_low_first():
    raw = Keystream(KEY, b"noise").read(80)
    words = Keystream(KEY, b"noise").words(10)
    assert words.dtype == np.uint64
    assert [int(word).to_bytes(8, "little") for word in words] == [
        raw[i : i + 8] for i in range(0, 80, 8)
    ]


@pytest.mark.parametrize("count", [0, 1, 3, 40_000])
def test_words_fill_a_given_array(count):
    stream, given_array = Keystream(KEY, b"noise", position=5), np.zeros(count, dtype=np.uint64)
    assert stream.fill(given_array) is given_array
    assert stream.position == 5 + 8 * count
    assert (given_array == Keystream(KEY, b"noise", position=5).words(count)).all()


def test_uniforms_are_the_top_53_bits_of_the_words():
    words = Keystream(KEY, b"noise").words(1000)
    drawn = Keystream(KEY, b"noise").uniforms(1000)
    assert drawn.dtype == np.float64
    assert [int(u * 2**53) for u in drawn] == [int(word) >> 11 for word in words]


def test_bits_are_fair_and_neighbours_independent():
    # 65 means of 250,000 bits: a right cipher exceeds five standard errors for one key in 27,000
    words = Keystream.seeded(0, b"noise").words(250_000)
    bits = (words[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / 500
    agree = (bits[1:, 0] == bits[:-1, 0]).mean()
    assert abs(agree - 0.5) < 5 * 0.5 / 500


def test_the_key_is_in_no_text_and_no_pickle():
    stream = Keystream(KEY, b"noise")
    assert repr(stream) == str(stream) == "<Keystream 'noise', secret, at byte 0>"
    for escape in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not pickled or copied"):
            escape(stream)
    for escape in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="not pickled or copied"):
            escape(SecureNoise(stream))


def in_a_fork(act):
    """What `act` said in a forked process: its result, or its error."""
    receiving, sending = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside torch's threads
        child = os.fork()
    if not child:
        try:
            said = repr(act())
        except BaseException as error:
            said = str(error)
        os.write(sending, said.encode())
        os._exit(0)
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.parametrize(
    "draw",
    [
        lambda stream: stream.read(8),
        lambda stream: stream.words(1),
        lambda stream: stream.fill_at(0, np.empty(2, np.uint64)),
        lambda stream: stream.fork(b"other").read(8),
        lambda stream: poisson_draw(stream, 8, 0.5),
        lambda stream: SecureNoise(stream).added_to({"w": torch.zeros(2)}, 1.0),
    ],
)
def test_a_forked_process_draws_nothing_of_its_parents_stream(draw, monkeypatch):
    """It drew the same bits: 8303d06ac4e0c3ee in both."""
    stream = Keystream.secret(b"noise")
    assert "belongs to the process that made it" in in_a_fork(lambda: draw(stream))
    draw(stream)
    monkeypatch.setattr(os, "getpid", lambda: -1)  # as in a fork that Python was not told of
    with pytest.raises(ValueError, match="belongs to the process that made it"):
        draw(stream)


def test_a_forked_process_holds_no_key_and_may_make_its_own():
    stream = Keystream(KEY, b"noise")
    held = stream._key
    assert in_a_fork(lambda: any(held)) == "False"
    drawn = {in_a_fork(lambda: Keystream.secret(b"noise").read(8)) for _ in range(2)}
    assert len(drawn) == 2
    assert stream._key == KEY


def test_destroying_overwrites_the_key_and_ends_the_stream():
    stream = Keystream(KEY, b"noise")
    held = stream._key
    stream.destroy()
    assert held == bytes(32)
    assert repr(stream) == "<Keystream 'noise', secret, destroyed>"
    for use in (
        lambda: stream.read(1),
        lambda: stream.words(1),
        lambda: stream.seek(0),
        lambda: stream.fork(b"sampling"),
    ):
        with pytest.raises(ValueError, match="was destroyed"):
            use()
    stream.destroy()


def test_a_key_of_the_wrong_length_is_refused_without_showing_it():
    with pytest.raises(ValueError, match="16 bytes; AES-256 takes 32") as refusal:
        Keystream(KEY[:16], b"noise")
    assert KEY[:16].hex() not in str(refusal.value)


@pytest.mark.parametrize("position", [-1, 2**68])
def test_a_position_outside_the_stream_is_refused(position):
    with pytest.raises(ValueError, match="position="):
        Keystream(KEY, b"noise").seek(position)


@pytest.mark.parametrize("position", [np.int64(32), 32.0])
def test_a_position_of_another_type_is_the_same_place(position):
    stream, other = Keystream(KEY, b"noise"), Keystream(KEY, b"noise")
    stream.seek(position)
    other.seek(32)
    assert stream.position == 32
    assert stream.read(20) == other.read(20)


def test_a_read_never_runs_into_the_next_nonce():
    stream = Keystream(KEY, b"noise", position=2**68 - 8)
    stream.read(8)
    with pytest.raises(ValueError, match="beyond the stream"):
        stream.read(1)


def test_poisson_draws_each_index_at_the_rate_independently():
    # 40 rates and 780 pairs over 4000 draws: a right sampler exceeds 5.5 standard errors once in
    # 30,000 seeds
    stream = Keystream.seeded(0, b"sampling")
    rows = np.zeros((4000, 40))
    for row in rows:
        row[poisson_draw(stream, 40, 0.3).numpy()] = 1
    assert np.abs(rows.mean(axis=0) - 0.3).max() < 5.5 * np.sqrt(0.3 * 0.7 / 4000)
    together = (rows.T @ rows / 4000)[np.triu_indices(40, 1)]
    assert np.abs(together - 0.09).max() < 5.5 * np.sqrt(0.09 * 0.91 / 4000)


def test_poisson_indices_ascend_and_are_long():
    drawn = poisson_draw(Keystream.seeded(0, b"sampling"), 1000, 0.2)
    assert drawn.dtype == torch.int64
    assert (drawn.diff() > 0).all()


@given(coin=st.integers(0, 2**53 - 1), rate=st.floats(0, 1))
def test_a_coin_below_the_rate_by_a_whole_step_is_drawn(coin, rate):
    drawn = len(poisson_draw(Coins([coin << 11]), 1, rate)) == 1
    assert drawn == (Fraction(coin + 1, 2**53) <= Fraction(rate))


def test_poisson_at_the_ends_draws_none_or_all():
    ends = [0, 2**64 - 1]
    assert poisson_draw(Coins(ends), 2, 0.0).tolist() == []
    assert poisson_draw(Coins(ends), 2, 1.0).tolist() == [0, 1]
    assert poisson_draw(Coins([]), 0, 0.5).tolist() == []


@given(n=st.integers(0, 200_000), a=st.integers(0, 200_000), b=st.integers(0, 200_000))
@settings(deadline=None, max_examples=20)
def test_parts_of_a_poisson_sample_are_those_of_the_whole(n, a, b):
    first, last = sorted((min(a, n), min(b, n)))
    one, other = (Keystream.seeded(3, b"sampling") for _ in range(2))
    whole = poisson_draw(one, n, 0.3).numpy()
    part = poisson_draw(other, n, 0.3, first=first, last=last).numpy()
    assert (part == whole[(whole >= first) & (whole < last)]).all()
    assert one.position == other.position == 8 * n


def test_poisson_uses_as_much_of_the_stream_whatever_it_draws():
    for rate in (0.0, 0.5, 1.0):
        stream = Keystream.seeded(0, b"sampling")
        poisson_draw(stream, 100, rate)
        assert stream.position == 800


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_a_rate_that_is_no_probability_is_refused(rate):
    with pytest.raises(ValueError, match="not a probability"):
        poisson_draw(Keystream.seeded(0, b"sampling"), 10, rate)
