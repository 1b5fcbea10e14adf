"""The program of tests/gpu/exchange/test_one_gpu.py on CPU devices, by the definitions of the kernels of peers."""

import pytest

from ...gpu.exchange import peers_of_jax


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("part", peers_of_jax.PARTS)
def test_on_a_cpu(part: str, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    peers_of_jax.main(part, str(ranks))
    assert capsys.readouterr().out == f"ran {part} on {ranks}\n"
