"""What a run writes down step by step: JSON lines, and event files where they are wanted."""

import json
import struct

from tensorboardX.proto.event_pb2 import Event

from specjax.training.log import Log


def events(folder):
    """(step, tag, value) of every scalar in the event files: length, crc, message, crc."""
    found = []
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    return found


def test_event_files_hold_what_the_lines_hold(tmp_path):
    with Log(tmp_path, 0, tensorboard=True) as log:
        log.write("metrics", 1, {"loss": 2.5, "acceptance": [0.5, 0.25], "note": "text"})
        log.write("walks", 1, {"tau": 1.5})
    assert events(tmp_path / "events") == [
        (1, "metrics/loss", 2.5),
        (1, "metrics/acceptance/0", 0.5),
        (1, "metrics/acceptance/1", 0.25),
        (1, "walks/tau", 1.5),
    ]


def test_steps_that_are_made_again_are_written_once(tmp_path):
    with Log(tmp_path, 0) as log:
        for step in (1, 2, 3):
            log.write("metrics", step, {"loss": float(step)})
    assert not (tmp_path / "events").exists()
    with Log(tmp_path, 1) as log:
        log.write("metrics", 2, {"loss": 20.0})
    written = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert written == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 20.0}]
