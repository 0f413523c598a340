"""What a GPU's step makes the host wait for, and what fails on a GPU alone: on a device that is not there.

Every mode, layout and feature trains for three steps on the fake device (:mod:`fake_cuda`), with autograd's thread for
it. In the third step the host may wait for nothing but what a page documents (:data:`gpu_cells.DOCUMENTED`).
"""

import os

import pytest
from families import SEED, WHOLE, cases, family
from gpu_cells import ALL_LAYOUTS, DOCUMENTED, FEATURES, PART, ROOT, Cell, Runs, every, on_fake_device, problems
from matrix import MODES

pytestmark = on_fake_device
INSIDE = {feature for feature, added in FEATURES.items() if added.get("program", "scaler") != "scaler"}
"""Those that train inside Fabric, Accelerate or a trainer."""
CELLS = cases("gpu ways", every() if WHOLE or SEED else PART, PART, 4)


@pytest.fixture(scope="module")
def runs(request):
    chosen = [item.callspec.params["cell"] for item in request.session.items if "runs" in item.fixturenames]
    started = Runs(chosen, min(2, os.cpu_count() or 1) if WHOLE else 1)
    yield started
    started.close()


@family
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_host_waits_for_nothing_in_a_step(cell, runs):
    found = problems(runs[cell])
    assert not found, "\n".join(found)
    if cell.feature not in INSIDE:
        return
    for rank, of_rank in runs[cell].items():  # it asks there whether the step was made
        assert any("DistributedGradScaler.has_overflowed" in line for _, lines in of_rank["waits"] for line in lines), (
            rank
        )


def test_every_mode_has_every_feature_that_it_can_have():
    assert {cell.mode for cell in PART} <= set(MODES)
    for feature in FEATURES:
        assert any(Cell(mode, layout, feature).is_one() for layout in ALL_LAYOUTS for mode in MODES), feature


@pytest.mark.parametrize("row", DOCUMENTED, ids=lambda row: row.functions[0])
def test_pages_document_what_waits(row):
    assert row.sentence in " ".join((ROOT / row.page).read_text(encoding="utf-8").split())
