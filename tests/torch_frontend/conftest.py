import pytest
from mxep.torch_frontend.ops import direct
from torch import Tensor


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ops that quantized a weight, as they run."""
    calls: list[str] = []

    def spied(name: str) -> None:
        real = getattr(direct, name)

        def spy(x: Tensor, *rest: int):
            if x.dim() == 3:
                calls.append(name)
            return real(x, *rest)

        monkeypatch.setattr(direct, name, spy)

    for name in (
        *("quantize_row", "quantize_col", "quantize_both", "dequantize"),
        *("quantize_row_fold", "quantize_matrix_fold", "quantize_matrix_fold_t"),
    ):
        spied(name)
    return calls
