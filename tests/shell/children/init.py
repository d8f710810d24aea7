"""PID 1 of a container with a trainer and with orphans of other people: prints what became of them as JSON."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from runner.supervisor.guard import processes
from runner.supervisor.trainer import OrphanReaper, Trainer

folder, child = Path(sys.argv[1]), Path(__file__).with_name("child.py")
assert os.getpid() == 1

# Three hundred orphans that end as zombies, and own children whose exit code must not be stolen meanwhile.
subprocess.run(["sh", "-c", "for n in $(seq 300); do (true &) ; done"], check=True)
time.sleep(0.2)
zombies = sum(process.state == "Z" for process in processes().values())
reaper = OrphanReaper(patience=0.3)
codes, reaped = set(), 0
until = time.monotonic() + 20
while reaped < zombies and time.monotonic() < until:
    codes.add(subprocess.run(["sh", "-c", "exit 7"], check=False).returncode)
    reaped += len(reaper.reap(time.monotonic()))

trainer = Trainer()
trainer.start([sys.executable, str(child), "daemons", str(folder)], env=dict(os.environ), cwd="/", output_fd=2)
while not (folder / "ready").exists():
    time.sleep(0.01)
trainer.kill()
trainer.wait(timeout=15)
print(
    json.dumps(
        {
            "zombies": zombies,
            "reaped": reaped,
            "codes": sorted(codes),
            "others": len(processes()) - 1,
        }
    )
)
