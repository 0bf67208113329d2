"""Features of one picture depend on that picture alone."""

import torch
from torch.nn.functional import normalize

from experiments.features import WIDTH, features

PICTURES = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_features_have_norm_one_and_the_stated_width():
    found = features(PICTURES)
    assert found.shape == (6, WIDTH)
    assert torch.allclose(found.norm(dim=1), torch.ones(6), atol=1e-5)


def test_features_of_a_picture_do_not_depend_on_the_others():
    torch.testing.assert_close(features(PICTURES)[2:3], features(PICTURES[2:3]))


def test_oriented_features_do_not_depend_on_brightness():
    """A constant added to all colours moves the mean colour, and no derivative."""
    oriented = slice(0, 8 * (64 + 3 * 16))
    a, b = (features(0.5 * PICTURES + shift)[:, oriented] for shift in (0.0, 0.2))
    torch.testing.assert_close(normalize(a), normalize(b), atol=1e-5, rtol=1e-3)
