"""Fixtures of all tests: the device under test, seeds, poison."""

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="device under test: cpu or cuda")


@pytest.fixture(scope="session")
def device(request) -> torch.device:
    """The device under test."""
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def cuda(device) -> torch.device:
    """The device under test, which is a GPU."""
    if device.type != "cuda":
        pytest.skip("needs --device=cuda")
    return device


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=["baseline", "avx2", "avx512", "avx512vnni", "amx"])
def cpu_level(request):
    """Runs a test at each instruction level of the CPU back end that this processor has."""
    from flash_csa import _C

    before = _C.cpu_level()
    try:
        _C.set_cpu_level(request.param)
    except ValueError:
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    _C.set_cpu_level(before)


@pytest.fixture(scope="module")
def no_truths():
    """Accuracy runs without them: they take seconds, and have tests of their own."""
    from flash_csa.accuracy import runner

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.truths, "check", lambda backend, seed, device: [])
        yield
