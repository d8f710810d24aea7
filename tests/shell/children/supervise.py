"""A supervisor that does nothing but keep a trainer: ``supervise.py FOLDER COMMAND...``.

Leaves ``guard`` (its pid) in FOLDER when the trainer runs, and prints how it ended as JSON.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path

from runner.supervisor.guard import processes
from runner.supervisor.trainer import Trainer

folder, command = Path(sys.argv[1]), sys.argv[2:]
trainer = Trainer()
trainer.start(command, env=dict(os.environ), cwd=str(folder), output_fd=sys.stderr.fileno())
(guard,) = [pid for pid, process in processes().items() if process.parent == os.getpid()] or [0]
(folder / "guard.part").write_text(str(guard))
(folder / "guard.part").rename(folder / "guard")
ended = trainer.wait()
print(json.dumps(dataclasses.asdict(ended)), flush=True)
