"""By default options no correct model is called wrong, and each planted defect is found, in fp16 and in bf16."""

import itertools

import pytest
import right_models
from families import cases, family, number
from planted_defects import DEFECTS, options, planted
from verify_runs import reports

LAYOUTS = {"tp2": {"tensor": 2}, "pp2": {"pipeline": 2}, "dp2": {"data": 2}}
SHARED = LAYOUTS | {"cp2": {"context": 2}}
"""The last one for models of sequences."""
MODES = ("16-mixed", "bf16-mixed")
RIGHT = [*itertools.product(right_models.MODELS, LAYOUTS, MODES)]
RIGHT += [*itertools.product(("tied GPT", "Llama"), ("cp2",), MODES)]
WRONG = [*itertools.product(DEFECTS, MODES)]


@family
@pytest.mark.parametrize(
    ("model", "layout", "mode"), cases("verify models", RIGHT, [("encoder-decoder", "pp2", "16-mixed")], 2)
)
def test_a_correct_model_follows(model, layout, mode):
    settings = {"parallel": SHARED[layout], "precision": mode}
    every = [right_models.options(model, **settings, seed=seed) for seed in range(1, 1 + number(1, 5))]
    for report in reports(every):
        lines = [*report.lines()]
        assert report.ok, "\n".join(lines)
        assert lines[-1] == f"{layout} follows the single process"
        compared = [layer for layer in report.layers if layer.forward is not None]
        assert len(compared) > 0.8 * len(report.layers)


def test_the_library_has_what_each_defect_changes():
    for defect in DEFECTS:
        with planted(defect):
            pass


@family
@pytest.mark.parametrize(
    ("defect", "mode"),
    cases("verify defects", WRONG, [("the last stage steps a tied weight with its own gradient", "bf16-mixed")], 2),
)
def test_a_planted_defect_is_found(defect, mode):
    (report,) = reports([options(defect, precision=mode)], defect)
    assert not report.ok, "\n".join(report.lines())
    assert report.first is not None or report.replicas
