"""Real processes over gloo end with the bits of the simulated runtime."""

import pytest
import torch

from paceline.cli.options import SCRATCH
from tests.support import forked
from tests.support.processes import SCRIPTS

METHODS = [
    "osp:collective=native,defer=most,most=1,budget=constant,chunk=256",
    "osp:collective=native,defer=most,most=0.5,budget=linear,ramp=30,chunk=256",
    "osp:collective=native",
]
"""The last one measures a network that is fast enough for so small a model, or is not:
what it defers is not the same in both runtimes, and it must end well."""


@pytest.mark.slow
def test_simulated_equals_real(tmp_path):
    """Two workers, uneven data, looks at the exact parameters in between."""
    folders = [tmp_path / "real", tmp_path / "simulated"]
    for folder in folders:
        folder.mkdir()
    script, (real, virtual) = SCRIPTS / "osp.py", folders
    forked.run_together(2, [script, real, *METHODS], folder=real)
    words = ["-m", "paceline", "simulate", "--workers=2", script, "--"]
    done = forked.run([*words, virtual, *METHODS], folder=virtual)
    assert done.returncode == 0, done.stderr
    folders[1] /= SCRATCH  # where a simulation's checkpoints end up
    for number, method in enumerate(METHODS):
        for rank in range(2):
            real, virtual = (
                torch.load(folder / f"{number}-{rank}.pt", weights_only=True)
                for folder in folders
            )
            assert real.keys() == virtual.keys()
            for name, tensor in real.items():
                assert torch.isfinite(tensor).all()
                if number < 2:
                    assert torch.equal(tensor, virtual[name]), f"{method}: {name}"
        ends = [
            torch.load(folders[0] / f"{number}-{rank}.pt", weights_only=True)
            for rank in range(2)
        ]
        assert torch.equal(ends[0]["0.weight"], ends[1]["0.weight"])
