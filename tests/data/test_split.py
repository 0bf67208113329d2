import numpy as np
import pytest
from torch.utils.data import Subset

from epsilons.data import Data, digits, fewer


def test_fewer_examples_keep_their_names_and_labels():
    whole, part = digits(), fewer(digits(), 50, seed=3)
    assert len(part.train) == len(part.examples) == 50
    place = {name: k for k, name in enumerate(whole.examples.ids.tolist())}
    for k, name in enumerate(part.examples.ids.tolist()):
        assert part.train.tensors[1][k] == whole.train.tensors[1][place[name]]
        assert part.examples.groups["class"][k] == whole.examples.groups["class"][place[name]]


def test_fewer_examples_of_any_data_set():
    whole = digits()
    listed = Data(list(zip(*whole.train.tensors, strict=True)), whole.examples)
    part = fewer(listed, 7)
    assert isinstance(part.train, Subset)
    np.testing.assert_array_equal(
        [int(y) for _, y in part.train], part.examples.groups["class"].astype(int)
    )


def test_more_than_there_are_is_refused():
    with pytest.raises(ValueError, match="expected 1 to 1437"):
        fewer(digits(), 2000)
