import platform
import resource

import pytest
import torch

from epsilons.training.allocator import keep_freed_memory


def page_faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@pytest.fixture(autouse=True)
def _told_anew():
    keep_freed_memory.cache_clear()
    yield
    keep_freed_memory.cache_clear()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
def test_memory_that_was_freed_is_not_asked_for_again():
    assert keep_freed_memory()
    size, pages = 2**24, 2**14  # 64 MiB: beyond what glibc keeps by default
    for _ in range(8):  # where it lies settles first
        torch.ones(size)
    before = page_faults()
    for _ in range(4):
        torch.ones(size)
    assert page_faults() - before < pages


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_a_choice_in_the_environment_stands(name, monkeypatch):
    monkeypatch.setenv(name, "131072")
    assert not keep_freed_memory()
