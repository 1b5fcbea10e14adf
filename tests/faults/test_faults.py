"""`make faults` runs rarely: the texts that it changes are in today's code."""

from pathlib import Path

import pytest

from .fault import Fault
from .faults import FAULTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.says)
def test_the_text_of_a_fault_stands_once_in_its_file(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.old) == 1
    assert (ROOT / fault.tests.split()[0].split("::")[0]).exists()
