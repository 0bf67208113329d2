"""Made-up people, faces and sentences, in the files and names of the real data sets."""

import numpy as np
import pytest
import torch
from PIL import Image

PEOPLE, HELD_OUT, FACES, SENTENCES = 1200, 400, 60, 80
RACES = ("White", "Black", "Asian-Pac-Islander")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Trainings as small as these only lose time to a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def made_up(tmp_path_factory):
    """A folder as `--data` takes it, with the files of Adult, UTKFace and SST-2."""
    folder = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    (folder / "adult").mkdir()
    (folder / "adult" / "adult.data").write_text(_people(PEOPLE, "", generator))
    (folder / "adult" / "adult.test").write_text("|1x3\n" + _people(HELD_OUT, ".", generator))
    (folder / "sst2").mkdir()
    for name in ("train", "dev", "test"):
        lines = [f"{'dull and ' * (k % 5)}good\t{k % 2}\n" for k in range(SENTENCES)]
        (folder / "sst2" / f"{name}.tsv").write_text("".join(lines))
    (folder / "UTKFace").mkdir()
    for k in range(FACES):
        gender, race, age = k % 2, k % 5, int(generator.integers(1, 90))
        name = f"{age}_{gender}_{race}_201701162030{k:05d}.jpg.chip.jpg"
        pixels = generator.integers(60 * gender, 180 + 60 * gender, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / "UTKFace" / name)
    return folder


def _people(n, stop, generator):
    lines = []
    for _ in range(n):
        years = int(generator.integers(1, 17))
        rich = generator.random() < years / 20
        lines.append(
            f"{generator.integers(17, 91)}, Private, 77516, Bachelors, {years}, Divorced, Sales, "
            f"Wife, {generator.choice(RACES)}, {generator.choice(['Female', 'Male'])}, 0, 0, "
            f"{generator.integers(1, 100)}, United-States, {'>50K' if rich else '<=50K'}{stop}"
        )
    return "\n".join(lines) + "\n"
