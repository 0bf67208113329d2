import math
from fractions import Fraction

import mpmath
import numpy as np
import one_word
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from one_word import direction, nearest, squared_radius
from scipy import stats
from torch.testing._internal.two_tensor import TwoTensor

from epsilons.accounting.sums import grid, rounding_charge
from epsilons.noise import SecureNoise, SeededNoise, gaussian
from epsilons.noise.grid import add_rounded, from_units
from epsilons.noise.keystream import Keystream

STD = 1.3
MILLION = 1_000_000


def gaussian_units(words, scale):
    """The units of some words."""
    made = words.copy()
    gaussian.gaussian_units(made, scale)
    return made.view(np.float64)


def noise_values(count=MILLION, seed=0, std=STD):
    """Noise alone, in standard deviations."""
    zeros = torch.zeros(count, dtype=torch.float64)
    return SeededNoise(seed).added_to({"w": zeros}, std)["w"].numpy() / std


def released(total, seed):
    """A million releases of one sum."""
    sums = {"w": torch.full((MILLION,), float(total), dtype=torch.float64)}
    return SeededNoise(seed).added_to(sums, STD)["w"].numpy()


def copied(sums):
    return {name: total.clone() for name, total in sums.items()}


def words_for(units, scale):
    """Random words whose first Gaussian falls into the middle of each given cell of the grid."""
    x = units / scale
    u = np.floor(np.exp(-(x**2 + 1) / 2) * 2.0**64)
    radius = np.sqrt(-2 * np.log((u + 0.5) * 2.0**-64))
    quarters = np.arccos(x / radius) / (np.pi / 2)
    quarter = np.floor(quarters + 0.5)
    within = np.clip((quarters - quarter) * 2.0**62, -(2.0**61), 2.0**61 - 2**10).astype(np.int64)
    angle = (quarter.astype(np.int64) << 62) | (within & (2**62 - 1))
    return np.concatenate([u.astype(np.uint64), angle.view(np.uint64)])


def explained_on_the_grid(values, total):
    """Which values are released from `total` for some random words, found by making the words."""
    g = grid(STD)
    units = values / g - round(total / g)
    made = gaussian_units(words_for(units, STD / g), STD / g)[: len(units)]
    return made == units


def explained_in_floats(values, total):
    """Which values are `total` plus some float64 at all."""
    nearest = values - total
    candidates = [nearest, np.nextafter(nearest, np.inf), np.nextafter(nearest, -np.inf)]
    return np.any([total + candidate == values for candidate in candidates], axis=0)


@pytest.mark.parametrize(("total", "other"), [(0, 1), (1, 0)])
def test_no_release_from_one_sum_is_impossible_under_the_other(total, other):
    # the probe of Mironov 2012
    assert explained_on_the_grid(released(total, seed=5), other).all()


def test_the_probe_catches_noise_added_in_floating_point():
    values = 0.0 + STD * np.random.default_rng(5).standard_normal(MILLION)
    assert explained_in_floats(values, 0.0).all()
    assert 1 - explained_in_floats(values, 1.0).mean() > 0.3


@pytest.mark.parametrize("total", [0, 1, math.pi])
def test_the_last_byte_is_uniform_whatever_the_sum(total):
    # chi-square with 255 degrees: a right program fails for one seed in 10⁴
    units = np.rint(released(total, seed=6) / grid(STD)).astype(np.int64)
    counts = np.bincount(units & 255, minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-4


def test_noise_is_gaussian():
    # Kolmogorov–Smirnov: a right program fails for one seed in 10⁴
    assert stats.kstest(noise_values(), "norm").pvalue > 1e-4


@pytest.mark.parametrize("level", [3.0, 4.0, 4.5])
def test_the_tails_hold_as_much_as_a_gaussians(level):
    # binomial counts: a right program fails for one seed in 10⁴, at each level
    beyond = int((np.abs(noise_values()) > level).sum())
    assert stats.binomtest(beyond, MILLION, 2 * stats.norm.sf(level)).pvalue > 1e-4


def test_coordinates_are_uncorrelated_and_so_are_their_squares():
    # 22 correlations: a right program exceeds five standard errors for one seed in 80,000
    drawn = noise_values()
    for x in (drawn, drawn**2 - 1):
        for lag in (1, 2, 3, 7, 64, 1 << 12, 1 << 13, (1 << 13) + 1, 1 << 14, 1 << 15, 1 << 18):
            together = np.mean(x[lag:] * x[:-lag]) / np.mean(x**2)
            assert abs(together) < 5 / math.sqrt(MILLION - lag)


EXTREMES = [0, 1, 2, 2**11, 2**53, 2**63 - 1, 2**63, 2**64 - 2**12, 2**64 - 101, 2**64 - 2]
EXTREMES += [2**64 - 1, int(2**64 * math.sqrt(0.5)) - 2**12, int(2**64 * math.sqrt(0.5)) + 2**12]
ANGLES = [0, 1, 2**61 - 1, 2**61, 2**62 - 1, 2**62, 3 * 2**61, 2**63 - 1, 2**63, 2**64 - 1]


RANDOM = np.random.default_rng(0).integers(0, 2**64, (2, 300), dtype=np.uint64).tolist()


def exponential(u):
    """−ln((u + ½)/2⁶⁴) to fifty digits."""
    return -mpmath.log((mpmath.mpf(u) + 0.5) / 2**64)


def angle(v):
    """The angle that a word stands for, to fifty digits: each quarter is centred on its axis."""
    quarter, rest = divmod(v, 2**62)
    signed = rest if rest < 2**61 else rest - 2**62
    return (quarter + (mpmath.mpf(signed) + 0.125) / 2**62) * mpmath.pi / 2


def test_logarithm_sine_and_cosine_are_right_to_the_last_bits_of_float64():
    with mpmath.workdps(50):
        for u in EXTREMES + RANDOM[0]:
            assert abs(squared_radius(u) / (2 * exponential(u)) - 1) < 2.0**-51
        for v in ANGLES + RANDOM[1]:
            cos, sin = direction(v)
            assert abs(cos - mpmath.cos(angle(v))) < 2.0**-52
            assert abs(sin - mpmath.sin(angle(v))) < 2.0**-52


def test_the_transform_agrees_with_fifty_digits_out_to_the_ends():
    pairs = [(u, v) for u in EXTREMES for v in ANGLES] + list(zip(*RANDOM, strict=True))
    scale = 2.0**33
    words = np.array([u for u, _ in pairs] + [v for _, v in pairs], dtype=np.uint64)
    made = gaussian_units(words, scale).reshape(2, -1).T.tolist()
    slack = 2.0**-14  # a few rounding errors of float64 in a value below 2³⁷
    with mpmath.workdps(50):
        for (u, v), (cos, sin) in zip(pairs, made, strict=True):
            radius = scale * mpmath.sqrt(2 * exponential(u))
            assert abs(radius * mpmath.cos(angle(v)) - cos) <= 0.5 + slack
            assert abs(radius * mpmath.sin(angle(v)) - sin) <= 0.5 + slack


def test_noise_reaches_beyond_nine_standard_deviations():
    far = gaussian_units(np.array([0, 0], dtype=np.uint64), 2.0**32)[0] / 2**32
    assert far == pytest.approx(math.sqrt(2 * 65 * math.log(2)))


def test_every_cell_out_to_eight_standard_deviations_can_be_drawn():
    scale = 1.7 * 2**32
    rng = np.random.default_rng(3)
    cells = np.concatenate(
        [
            np.arange(-2000, 2001),
            *(
                np.rint(x * scale) + rng.integers(-(2**20), 2**20, 2000)
                for x in (-8, -6.5, -5, -1, 1, 3, 5, 7, 8)
            ),
        ]
    )
    assert (gaussian_units(words_for(cells, scale), scale)[: len(cells)] == cells).all()


def test_a_product_is_rounded_once_to_the_grid():
    # products next to the edge of a cell: rounded to float64 first, two in five would cross it
    rng = np.random.default_rng(4)
    ratios = rng.uniform(0.1, 1, 2000) * rng.choice([-1, 1], 2000)
    radii = (rng.integers(1, 2**33, 2000) + 0.5) / np.abs(ratios)
    for radius, ratio in zip(radii.tolist(), ratios.tolist(), strict=True):
        exact = math.floor(Fraction(radius) * Fraction(ratio) + Fraction(1, 2))
        assert nearest(radius, ratio) == exact


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32), pairs=st.integers(0, 1200), scale=st.floats(1, 2**33))
def test_blocks_of_words_give_the_bits_of_one_word_at_a_time(seed, pairs, scale):
    rng = np.random.default_rng(seed)
    ends = np.array(EXTREMES + ANGLES + [2**k - 1 for k in range(64)], dtype=np.uint64)
    words = rng.integers(0, 2**64, 2 * pairs, dtype=np.uint64)
    words = np.where(rng.random(2 * pairs) < 0.3, rng.choice(ends, 2 * pairs), words)
    # as float64, whose signs count also at 0
    plain = one_word.gaussian_units(words, scale).astype(np.float64).tobytes()
    assert gaussian_units(words, scale).tobytes() == plain


def test_all_pairs_of_extreme_words_give_the_bits_of_one_word_at_a_time():
    ends = np.array(EXTREMES + ANGLES + [2**k for k in range(64)], dtype=np.uint64)
    words = np.concatenate([np.repeat(ends, ends.size), np.tile(ends, ends.size)])
    for scale in (1.0, 2.0**32, 1.9 * 2**32, 2.0**33):
        assert (gaussian_units(words, scale) == one_word.gaussian_units(words, scale)).all()


def added_as_integers(sums, std, stream):
    """Sum and noise in int64, in chunks of 2¹⁴ coordinates, from one word at a time."""
    g = grid(std)
    results = {}
    for name, total in sums.items():
        parts = []
        for part in total.reshape(-1).split(1 << 14):
            units = np.rint(part.double().numpy() / g).astype(np.int64)
            words = stream.words(units.size + units.size % 2)
            units += one_word.gaussian_units(words, std / g)[: units.size]
            parts.append(torch.from_numpy(units * g).to(total.dtype))
        results[name] = torch.cat(parts).view(total.shape)
    return results


@pytest.mark.parametrize("cores", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bits_are_those_of_integers_on_any_number_of_cores(cores, dtype, monkeypatch):
    monkeypatch.setattr("epsilons.accounting.threads.available", lambda: cores)
    generator = torch.Generator().manual_seed(0)
    sizes = [1, 0, 7, 40_001, 16_384, 16_385, 100, 3]
    sums = {
        str(i): (
            torch.randn(size, generator=generator, dtype=dtype)
            * 2.0 ** torch.randint(-40, 28, (size,), generator=generator)
        )
        for i, size in enumerate(sizes)
    }
    noise, stream = SeededNoise(3), Keystream.seeded(3, b"noise")
    plain, noisy = added_as_integers(sums, STD, stream), noise.added_to(sums, STD)
    assert noise.keystream.position == stream.position
    for name in sums:
        assert noisy[name].numpy().tobytes() == plain[name].numpy().tobytes()


@pytest.mark.parametrize(("shards", "parts"), [(1, 1), (3, 1), (3, 2), (5, 4)])
def test_shards_and_parts_of_the_noise_add_up_to_one_release(shards, parts):
    """Sums of shards that lie on the grid, and noise made in parts: the bits of one sum."""
    sizes = (7, 40_001, 16_385)
    units = np.random.default_rng(1).integers(-(2**40), 2**40, (shards, sum(sizes)))
    whole, edges = units.sum(axis=0) * grid(STD), np.cumsum(sizes)[:-1]
    sums = {str(k): torch.from_numpy(v) for k, v in enumerate(np.split(whole, edges))}
    expected = SeededNoise(3).added_to(sums, STD, 24)
    added = np.zeros(sum(sizes), np.int64)
    for shard in units:
        parted = np.split(shard * grid(STD), edges)
        add_rounded(added, {str(k): torch.from_numpy(v) for k, v in enumerate(parted)}, STD, shards)
    for part in range(parts):
        noise = SeededNoise(3)
        noise.add_units(added, sizes, STD, part, parts)
    released = np.split(from_units(added, STD, 24), edges)
    for name, values in expected.items():
        assert values.numpy().tobytes() == released[int(name)].tobytes()


@pytest.mark.parametrize("value", [math.nan, math.inf, 2.0**61 * grid(STD)])
def test_a_shards_sum_that_could_overflow_the_total_is_refused(value):
    with pytest.raises(ValueError, match="w: the clipped sum"):
        add_rounded(np.zeros(1, np.int64), {"w": torch.tensor([value]).double()}, STD, 3)


def test_a_stream_read_to_the_middle_of_a_block_gives_the_words_that_follow():
    noise, stream = SeededNoise(3), Keystream.seeded(3, b"noise")
    noise.keystream.seek(24)
    stream.seek(24)
    sums = {"w": torch.randn(1000)}
    expected = added_as_integers(sums, STD, stream)
    assert (noise.added_to(sums, STD)["w"] == expected["w"]).all()


def test_a_destroyed_stream_gives_no_noise():
    noise = SeededNoise(1)
    noise.keystream.destroy()
    with pytest.raises(ValueError, match="destroyed"):
        noise.added_to({"w": torch.zeros(5)}, STD)


def test_the_divisor_divides_what_was_released():
    sums = {"w": torch.randn(1000), "x": torch.randn(7, dtype=torch.float64)}
    for std in (STD, 0.0):
        whole, part, eighth = (
            SeededNoise(2).added_to(copied(sums), std, divisor) for divisor in (1, 24, 8)
        )
        for name in sums:
            assert torch.allclose(part[name], whole[name] / 24, rtol=2e-7, atol=0)
        assert (eighth["w"] == whole["w"] / 8).all()
    with pytest.raises(ValueError, match="divisor"):
        SeededNoise(2).added_to(sums, STD, 0)


def test_a_seed_gives_the_same_noise_on_every_machine():
    # frozen; integers, so that equality is exact
    drawn = SeededNoise(0).added_to({"w": torch.zeros(6, dtype=torch.float64)}, 1.0)["w"]
    assert (drawn.numpy() * 2**32).astype(np.int64).tolist() == [
        -2814841517,
        -4408541231,
        -8396773358,
        -6866110695,
        -2545751391,
        4506366633,
    ]


def test_seeded_noise_differs_from_secure_noise_in_the_key_alone():
    seeded = SeededNoise(4)
    key = bytes(seeded.keystream._key)
    sums = {"a": torch.ones(5), "b": torch.ones(3, 4)}
    one = seeded.added_to(copied(sums), STD)
    two = SecureNoise(Keystream(key, b"noise")).added_to(sums, STD)
    assert all((one[name] == two[name]).all() for name in sums)


def test_secure_noise_is_new_every_time():
    one, two = (SecureNoise().added_to({"w": torch.zeros(4)}, STD)["w"] for _ in range(2))
    assert (one != two).all()


def test_secure_noise_refuses_a_key_that_a_seed_gives():
    with pytest.raises(ValueError, match="not secret"):
        SecureNoise(Keystream.seeded(1, b"noise"))


def test_noise_resumed_at_a_position_continues():
    noise, sums = SeededNoise(2), {"a": torch.zeros(5), "b": torch.zeros(20_001)}
    noise.added_to(sums, STD)
    resumed = SeededNoise(2)
    resumed.keystream.seek(noise.keystream.position)
    one, two = noise.added_to(copied(sums), STD), resumed.added_to(sums, STD)
    assert all((one[name] == two[name]).all() for name in sums)


def test_tensors_and_calls_get_noise_of_their_own():
    noise, sums = SeededNoise(2), {"a": torch.zeros(8), "b": torch.zeros(8)}
    drawn = [t for _ in range(2) for t in noise.added_to(copied(sums), STD).values()]
    assert len(torch.cat(drawn).unique()) == 32


def test_noise_follows_the_logical_order_of_a_tensor():
    plain = torch.arange(120.0).view(2, 3, 4, 5)
    channels_last = plain.to(memory_format=torch.channels_last)
    one = SeededNoise(2).added_to({"w": plain}, STD)["w"]
    two = SeededNoise(2).added_to({"w": channels_last}, STD)["w"]
    assert (one == two).all()
    assert two.is_contiguous(memory_format=torch.channels_last)


DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "returned"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
    ],
)
def test_results_keep_shape_device_and_at_least_single_precision(device, dtype, returned):
    sums = {"w": torch.ones(3, 2, dtype=dtype, device=device), "s": torch.ones((), dtype=dtype)}
    noisy = SeededNoise(2).added_to(copied(sums), STD)
    assert list(noisy) == ["w", "s"]
    assert (noisy["w"].dtype, noisy["w"].device.type) == (returned, device)
    assert (noisy["w"].shape, noisy["s"].shape) == ((3, 2), ())
    wide = SeededNoise(2).added_to({k: v.double() for k, v in sums.items()}, STD)
    assert (noisy["w"] == wide["w"].to(returned)).all()


def test_the_result_is_written_over_sums_with_memory_of_their_own():
    sums = {"w": torch.ones(4, 3), "x": torch.ones(5, dtype=torch.float64)}
    noisy = SeededNoise(2).added_to(sums, STD)
    assert all(noisy[name] is total for name, total in sums.items())
    assert (sums["w"] != 1).all()


def test_sums_whose_memory_others_see_are_left_as_they_were():
    both = torch.ones(6)
    first, second = both.split(3)
    leaf = torch.ones(4, requires_grad=True)
    tied = torch.ones(2)
    foreign = np.ones(9, np.float32)
    overlapping = torch.from_numpy(foreign[:6]), torch.from_numpy(foreign[3:])
    zeros = torch._efficientzerotensor(5)
    sums = {"a": first, "b": second, "leaf": leaf, "tied": tied, "again": tied, "zeros": zeros}
    sums |= {"c": overlapping[0], "d": overlapping[1]}
    alone = SeededNoise(2).added_to({name: t.detach().clone() for name, t in sums.items()}, STD)
    noisy = SeededNoise(2).added_to(sums, STD)
    assert all(torch.equal(noisy[name], alone[name]) for name in sums)
    assert (both == 1).all()
    assert (foreign == 1).all()
    assert (leaf == 1).all()
    assert not noisy["leaf"].requires_grad
    assert len({t.data_ptr() for t in noisy.values()}) == len(sums)


def test_results_lie_on_the_grid():
    total = torch.linspace(-3, 3, 1000, dtype=torch.float64)
    units = SeededNoise(2).added_to({"w": total}, STD)["w"].numpy() / grid(STD)
    assert (units == np.rint(units)).all()


def test_without_noise_the_sums_come_back_unrounded():
    noise, total = SeededNoise(2), torch.rand(4)
    assert (noise.added_to({"w": total}, 0.0)["w"] == total).all()
    assert rounding_charge(0.0, 4) == 0
    assert noise.keystream.position == 0


@given(std=st.floats(1e-250, 1e300))
def test_the_grid_is_the_largest_power_of_two_that_is_fine_enough(std):
    g = grid(std)
    assert math.frexp(g)[0] == 0.5
    assert g <= 2.0**-32 * std < 2 * g


vectors = arrays(np.float64, 12, elements=st.floats(-50, 50))


@settings(deadline=None)
@given(total=vectors, moved=vectors, near=st.booleans(), std=st.floats(0.01, 100))
def test_rounding_moves_the_sum_by_no_more_than_is_charged(total, moved, near, std):
    other = total + moved * (grid(std) if near else 1.0)
    # the same noise on both: it cancels
    one = SeededNoise(1).added_to({"w": torch.from_numpy(total)}, std)["w"].numpy()
    two = SeededNoise(1).added_to({"w": torch.from_numpy(other)}, std)["w"].numpy()
    bound = np.linalg.norm(other - total) * (1 + 1e-12) + rounding_charge(std, 12)
    assert np.linalg.norm(two - one) <= bound


def test_a_sum_between_two_points_of_the_grid_moves_by_the_whole_charge():
    g = grid(STD)
    below = torch.full((100,), 0.5 * g * (1 - 1e-9), dtype=torch.float64)
    above = torch.full((100,), 0.5 * g * (1 + 1e-9), dtype=torch.float64)
    one = SeededNoise(1).added_to({"w": below}, STD)["w"]
    two = SeededNoise(1).added_to({"w": above}, STD)["w"]
    assert float((two - one).norm()) == pytest.approx(rounding_charge(STD, 100), rel=1e-12)


@given(std=st.floats(1e-100, 1e100), dimensions=st.integers(1, 10**12))
def test_the_charge_is_rounded_up(std, dimensions):
    with mpmath.workdps(50):
        exact = mpmath.mpf(grid(std)) * mpmath.sqrt(dimensions)
    assert exact <= rounding_charge(std, dimensions) <= exact * (1 + 1e-15)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 2.0**62, -(2.0**62)])
def test_sums_that_do_not_fit_are_refused_before_any_noise_is_drawn(bad):
    std = 2.0**32  # grid 1
    noise = SeededNoise(2)
    fine, total = torch.zeros(3), torch.zeros(5, dtype=torch.float64)
    total[3] = bad
    with pytest.raises(
        ValueError, match=r"layer\.weight: the clipped sum is not finite or exceeds"
    ):
        noise.added_to({"fine": fine, "layer.weight": total}, std)
    assert noise.keystream.position == 0
    assert fine.isnan().all()  # and not with noise that will be drawn again


def test_the_largest_sums_that_fit_are_added_without_overflow():
    largest = 2.0**62 - 2**10
    total = torch.tensor([largest, -largest], dtype=torch.float64)
    noisy = SeededNoise(2).added_to({"w": total.clone()}, 2.0**32)["w"]
    assert ((noisy - total).abs() < 2.0**37).all()


@pytest.mark.parametrize("std", [-1.0, math.nan, math.inf, 1e-305])
def test_a_standard_deviation_without_a_grid_is_refused(std):
    with pytest.raises(ValueError, match="std="):
        SeededNoise(2).added_to({"w": torch.zeros(2)}, std)


def test_empty_tensors_and_no_tensors_pass_through():
    noisy = SeededNoise(2).added_to({"w": torch.zeros(0, 3)}, STD)
    assert noisy["w"].shape == (0, 3)
    assert SeededNoise(2).added_to({}, STD) == {}


def test_complex_sums_are_refused():
    with pytest.raises(ValueError, match="complex"):
        SeededNoise(1).added_to({"w": torch.zeros(3, dtype=torch.complex64)}, STD)


def test_a_negated_view_is_taken_for_what_it_says():
    values = torch.randn(5, dtype=torch.complex64)
    negated = values.conj().imag
    assert negated.is_neg()
    one, two = (SeededNoise(1).added_to({"w": w}, STD)["w"] for w in (negated, -values.imag))
    assert torch.equal(one, two)


def test_a_tensor_whose_memory_is_elsewhere_is_refused():
    pair = TwoTensor(torch.zeros(3), torch.zeros(3))
    with pytest.raises(TypeError, match="plain tensor"):
        SeededNoise(1).added_to({"w": pair}, STD)
