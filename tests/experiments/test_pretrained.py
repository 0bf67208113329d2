"""EfficientNet-lite0, written out: each block against torch's own layers, where it is installed."""

import pytest
import torch
from torch import nn

from experiments import pretrained

PICTURES = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.mark.parametrize(("stride", "kernel"), [(1, 3), (1, 5), (2, 3), (2, 5)])
def test_a_convolution_is_padded_and_normalised_as_published(stride, kernel):
    torch.manual_seed(0)
    conv, norm = nn.Conv2d(4, 4, kernel, bias=False, groups=4), nn.BatchNorm2d(4, eps=1e-3).eval()
    norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)
    known = {"conv.weight": conv.weight} | {f"norm.{k}": v for k, v in norm.state_dict().items()}
    x = torch.randn(2, 4, 7, 9)
    found = pretrained._convolved(x, known, "conv", "norm", stride)
    assert found.shape[-2:] == (-(-7 // stride), -(-9 // stride))
    if stride == 1:  # TensorFlow's padding is the even one
        same = nn.functional.conv2d(x, conv.weight, padding=kernel // 2, groups=4)
        torch.testing.assert_close(found, norm(same))


@pytest.mark.skipif(pretrained.missing() is not None, reason=str(pretrained.missing()))
def test_features_of_a_picture_have_norm_one_and_do_not_depend_on_the_others():
    known = pretrained.weights()
    assert len([name for name in known if name.endswith("_project_conv.weight")]) == len(
        pretrained.STRIDES
    )
    found = pretrained.features(PICTURES, known, 64)
    assert found.shape == (3, pretrained.WIDTH)
    torch.testing.assert_close(found.norm(dim=1), torch.ones(3))
    alone = pretrained.features(PICTURES[1:2], known, 64)
    torch.testing.assert_close(found[1:2], alone, rtol=1e-4, atol=1e-6)
