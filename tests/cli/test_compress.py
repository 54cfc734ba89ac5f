"""``paceline compress``: a script's own gradients, coded by each compressor."""

import json

import pytest

from tests.support import forked
from tests.support.cli_scripts import CALLS_A_PART, TRAINS, TRAINS_NOTHING, write


def compress(folder, *words, status=0):
    done = forked.run(["-m", "paceline", "compress", *words], folder=folder)
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.mark.slow
def test_json_has_a_row_for_each_that_suits_and_a_reason_for_each_that_does_not(
    tmp_path,
):
    write(tmp_path, "train.py", TRAINS)
    words = ["--json", "--workers", 4, "--steps", 5]
    for spec in ("bf16", "none", "bf16:residuals=true"):
        words += ["--only", spec]
    done = compress(tmp_path, *words, "train.py", "--", 16)
    found = json.loads(done.stdout)
    assert found["workers"] == 4
    plain, corrected = found["compressors"]
    dense = 4 * (6 * 16 + 16 + 16 + 1)
    for row in (plain, corrected):
        assert (row["dense_bytes"], row["code_bytes"]) == (dense, dense / 2)
        assert row["ratio"] == 2
        assert row["traffic_bytes"] == pytest.approx(2 * 3 / 4 * dense / 2)
        assert row["dense_traffic_bytes"] == pytest.approx(2 * 3 / 4 * dense)
        assert row["steps"] == 5
        coding = row["encode_seconds"] + row["decode_seconds"]
        saved = row["dense_traffic_bytes"] - row["traffic_bytes"]
        assert row["pays_below"] == pytest.approx(saved / coding)
        assert 0 < row["error"] < 1 / 256
    assert plain["compression"] == "bf16"
    assert corrected["error_of_sum"] < plain["error_of_sum"]
    (unsuited,) = found["unsuited"]
    assert unsuited["compression"] == "none"
    assert "as it is" in unsuited["reason"]
    assert "the script speaks" not in done.stdout
    assert not list(tmp_path.glob("*.json"))  # it leaves nothing behind


@pytest.mark.slow
def test_a_table_says_what_it_is_made_of(tmp_path):
    write(tmp_path, "train.py", TRAINS)
    done = compress(tmp_path, "train.py", "--only", "fp16", "--only", "none")
    for words in (
        "4 workers",
        "fp16",
        "pays below B, where 2(n-1)/n S / B = encode + decode + sent / B",
        "paceline compare",
        "none does not suit: sends every tensor",
    ):
        assert words in done.stdout
    assert "fp16" not in done.stderr  # progress is for terminals


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            TRAINS_NOTHING,
            "ended without a gradient: it trained nothing",
            marks=pytest.mark.slow,
            id="nothing",
        ),
        pytest.param(
            TRAINS_NOTHING + "raise RuntimeError('boom')\n",
            "the job failed: rank 0 ended with exit status 1",
            marks=pytest.mark.slow,
            id="fails",
        ),
        pytest.param(
            CALLS_A_PART,
            "nothing to profile: expected more than 1 training steps",
            marks=pytest.mark.slow,
            id="calls a part of the model",
        ),
    ],
)
def test_a_script_without_gradients_is_one_message(text, message, tmp_path):
    write(tmp_path, "train.py", text)
    done = compress(tmp_path, "train.py", "--only", "bf16", status=1)
    assert message in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workers", 1], "--workers: expected 2 or more, got 1: one worker alone"),
        (["--steps", 0], "--steps: expected 1 or more"),
        (["--only", "bf61"], "unknown compression 'bf61'. Did you mean 'bf16'?"),
        (["--only", "bf16:bits=3"], "unknown key 'bits'"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_a_bad_command_runs_nothing(words, message, tmp_path):
    write(tmp_path, "train.py", TRAINS)
    done = compress(tmp_path, "train.py", *words, status=1)
    assert message in done.stderr
    assert not (tmp_path / "runs.txt").exists()
