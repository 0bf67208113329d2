import numpy as np
import pytest
from PIL import Image

from epsilons.data import image_folder, utkface


def picture(path, red=0, size=(40, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (red, 0, 255)).save(path)


@pytest.fixture
def zoo(tmp_path):
    for k in range(5):
        picture(tmp_path / "cats" / f"{k}.png", red=255)
        picture(tmp_path / "dogs" / "old" / f"{k}.jpg")
    (tmp_path / "dogs" / "notes.txt").write_text("no picture")
    return tmp_path


def test_the_folder_of_a_picture_is_its_class(zoo):
    data = image_folder(zoo, size=8, test_share=0)
    x, y = data.train.tensors
    assert x.shape == (10, 3, 8, 8)
    assert y.tolist() == [0] * 5 + [1] * 5
    assert data.classes == ("cats", "dogs")
    assert data.examples.ids[5] == "dogs/old/0.jpg"
    np.testing.assert_allclose(x[0, :, 0, 0].numpy(), [1, -1, 1], atol=1e-6)


def test_train_and_test_folders_are_kept_apart(tmp_path):
    picture(tmp_path / "train" / "a" / "1.png")
    picture(tmp_path / "train" / "b" / "1.png")
    picture(tmp_path / "test" / "b" / "2.png")
    data = image_folder(tmp_path, size=4)
    assert (len(data.train), data.test.tensors[1].tolist()) == (2, [1])
    picture(tmp_path / "test" / "c" / "3.png")
    with pytest.raises(ValueError, match="has the class c; expected one of a, b"):
        image_folder(tmp_path, size=4)


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n then nothing"])
def test_a_damaged_picture_is_named(zoo, content):
    (zoo / "cats" / "3.png").write_bytes(content)
    with pytest.raises(ValueError, match=r"3\.png is not a readable picture"):
        image_folder(zoo)


def test_a_truncated_picture_is_named(zoo):
    file = zoo / "dogs" / "old" / "1.jpg"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(ValueError, match=r"1\.jpg is not a readable picture"):
        image_folder(zoo)


def test_folders_without_classes_or_pictures_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no folders; expected one folder"):
        image_folder(tmp_path)
    (tmp_path / "cats").mkdir()
    with pytest.raises(ValueError, match="no pictures"):
        image_folder(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        image_folder(tmp_path / "none")


FACES = [
    "26_1_0_20170104023102422.jpg.chip.jpg", "35_0_1_20170104023102423.jpg",
    "29_0_4_20170104023102424.jpg", "30_1_3_20170104023102425.jpg", "1_0_2_20170104023102426.jpg",
]  # fmt: skip
MALFORMED = ["61_3_20170109150557335.jpg", "39_1_20170116174525125.jpg", "26_1_7_2017.jpg",
             "200_1_0_20170104023102427.jpg", "face.jpg"]  # fmt: skip


@pytest.fixture
def faces(tmp_path):
    for name in [*FACES, *MALFORMED]:
        picture(tmp_path / "part1" / name)
    return tmp_path


def test_names_give_gender_race_and_age(faces):
    data = utkface(faces, size=4, test_share=0)
    found = dict(zip(data.examples.ids, data.train.tensors[1].tolist(), strict=True))
    assert found == {f"part1/{name}": int(name.split("_")[1]) for name in FACES}
    races = dict(zip(data.examples.ids, data.examples.groups["race"], strict=True))
    assert races["part1/" + FACES[1]] == "Black"
    assert races["part1/" + FACES[2]] == "Others"


def test_malformed_names_are_skipped_and_counted(faces):
    data = utkface(faces, size=4)
    assert data.skipped == len(MALFORMED)
    assert len(data.train) + len(data.test) == len(FACES)


def test_the_age_task_asks_for_under_thirty(faces):
    data = utkface(faces, task="age", size=4, test_share=0)
    found = dict(zip(data.examples.ids, data.train.tensors[1].tolist(), strict=True))
    assert found == {f"part1/{name}": int(int(name.split("_")[0]) < 30) for name in FACES}


def test_balanced_labels_within_each_race(tmp_path):
    for k in range(30):
        gender, race = int(k % 3 == 0), k % 2
        picture(tmp_path / f"20_{gender}_{race}_{k}.jpg", size=(4, 4))
    data = utkface(tmp_path, size=4, test_share=0, balanced=True)
    groups = data.examples.groups
    counts = {
        (race, gender): int(((groups["race"] == race) & (groups["gender"] == gender)).sum())
        for race in ("White", "Black")
        for gender in ("male", "female")
    }
    assert set(counts.values()) == {5}


def test_faces_of_some_races_are_balanced_among_themselves(tmp_path):
    for k in range(20):
        picture(tmp_path / f"20_{int(k % 5 == 0)}_{k % 4}_{k}.jpg", size=(4, 4))
    some = utkface(tmp_path, size=4, test_share=0, races=["Black", "Asian"])
    assert set(some.examples.groups["race"]) == {"Black", "Asian"}
    assert len(some.examples) == 10
    balanced = utkface(tmp_path, size=4, test_share=0, races=["Black", "Asian"], balanced=True)
    groups = balanced.examples.groups
    counts = np.unique(
        [*zip(groups["race"], groups["gender"], strict=True)], axis=0, return_counts=True
    )
    assert set(counts[1]) == {1}
    with pytest.raises(ValueError, match="none of the 20 faces"):
        utkface(tmp_path, size=4, races=["Others"])
    with pytest.raises(ValueError, match="expected some of White, Black"):
        utkface(tmp_path, size=4, races=["black"])


def test_faces_without_names_are_refused(zoo):
    with pytest.raises(ValueError, match="none of the 10 pictures"):
        utkface(zoo)
    with pytest.raises(ValueError, match="expected 'gender' or 'age'"):
        utkface(zoo, task="race")
