"""Each script trains on a GPU where its framework finds one, and on no other device than the requested one."""

import jax
import pytest
import torch

from examples.training import train_jax, train_torch


@pytest.fixture
def torch_gpus(monkeypatch):
    """Two GPUs, as far as PyTorch says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_torch_prefers_a_gpu(torch_gpus, monkeypatch):
    assert (train_torch.find_device(None), train_torch.find_device("cpu")) == ("gpu", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert train_torch.find_device(None) == "gpu"
    assert train_torch.device_of("gpu") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(SystemExit, match=r"--device: got gpu for process 2 of this machine, which has 2 GPU\(s\)"):
        train_torch.find_device(None)


def test_torch_falls_back_only_without_a_request(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert train_torch.find_device(None) == "cpu"
    with pytest.raises(SystemExit, match="which has 0 GPU"):
        train_torch.find_device("gpu")


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("requested", [None, "cpu", "gpu"])
def test_jax_trains_on_the_default_backend(monkeypatch, backend, requested):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    if backend != "tpu" and requested in (None, backend):
        assert train_jax.find_device(1, requested) == backend
        return
    with pytest.raises(SystemExit, match=f"--device: got {requested}, and JAX finds {backend}"):
        train_jax.find_device(1, requested)


@pytest.mark.parametrize(
    ("processes", "devices", "ep", "message"),
    [
        (1, 8, 4, ""),
        (1, 2, 4, r"--ep: got 4 with 2 gpu device\(s\); allowed"),
        (2, 2, 2, ""),
        (2, 16, 2, r"--ep: got 2 with 16 gpu device\(s\) of 2 processes; --local-devices sets"),
    ],
)
def test_jax_has_one_device_per_rank(monkeypatch, processes, devices, ep, message):
    for name, value in (("default_backend", "gpu"), ("devices", [None] * devices), ("process_count", processes)):
        monkeypatch.setattr(jax, name, lambda value=value: value)
    if not message:
        assert train_jax.find_device(ep, None) == "gpu"
        return
    with pytest.raises(SystemExit, match=message):
        train_jax.find_device(ep, None)
