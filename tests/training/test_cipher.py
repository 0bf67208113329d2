import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from epsilons.training.cipher import HAS_AES, KEY_WORDS, cipher_words, round_keys

pytestmark = pytest.mark.skipif(not HAS_AES, reason="the processor has no instructions for AES")


def words(key, counter, count):
    """The stream of a key from a counter of 16 bytes on."""
    found = np.empty(count, np.uint64)
    nonce = np.frombuffer(counter[:8], np.uint64)[0]
    block = np.uint64(int.from_bytes(counter[8:], "big"))
    cipher_words(round_keys(key), nonce, block, found)
    return found.tobytes()


def test_round_keys_are_those_of_fips_197():
    # A.3: the first key word, two after the first round, and the last
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    keys = round_keys(key).tobytes()
    assert len(keys) == 8 * KEY_WORDS
    assert keys[:32] == key
    assert keys[32:40].hex() == "9ba354118e6925af"
    assert keys[-4:].hex() == "706c631e"


def test_words_are_those_of_nist_sp_800_38a():
    # F.5.5, CTR-AES256.Encrypt: the stream is ciphertext ⊕ plaintext
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    counter = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
    stream = words(key, counter, 8)
    plain = bytes.fromhex("6bc1bee22e409f96e93d7e117393172a")
    last = bytes.fromhex("f69f2445df4f9b17ad2b417be66c3710")
    assert bytes(a ^ b for a, b in zip(stream, plain, strict=False)).hex() == (
        "601ec313775789a5b7a7f504bbf3d228"
    )
    assert bytes(a ^ b for a, b in zip(stream[48:], last, strict=True)).hex() == (
        "dfc9c58db67aada613c2dd08457941a6"
    )


@settings(deadline=None)
@given(
    key=st.binary(min_size=32, max_size=32),
    nonce=st.binary(min_size=8, max_size=8),
    block=st.integers(0, 2**64 - 200) | st.integers(2**63 - 200, 2**63 + 200),
    blocks=st.integers(0, 150),
)
def test_words_are_the_librarys_for_any_key_and_place(key, nonce, block, blocks):
    counter = nonce + block.to_bytes(8, "big")
    library = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()
    assert words(key, counter, 2 * blocks) == library.update(bytes(16 * blocks))
