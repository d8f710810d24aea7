"""Small trainers, as text: no torch to load, but checkpoints in torch's own file format."""

from __future__ import annotations

PRELUDE = '''
import io, os, signal, sys, time, zipfile
from pathlib import Path

folder = Path(os.environ["CLOUDRUN_CHECKPOINT_DIR"])
resume = os.environ["CLOUDRUN_RESUME_FROM"]


def save(step, payload=b"weights"):
    """What torch.save writes: a zip whose directory comes last."""
    part = folder / f"step-{step}.pt.tmp"
    with zipfile.ZipFile(part, "w") as archive:
        archive.writestr("archive/data.pkl", b"\\x80\\x02}q\\x00.")
        archive.writestr("archive/data/0", payload * 100 + str(step).encode())
        archive.writestr("archive/version", b"3\\n")
    part.replace(folder / f"step-{step}.pt")


def load():
    if not resume:
        return 0
    with zipfile.ZipFile(resume) as archive:
        return int(archive.read("archive/data/0").rpartition(b"weights")[2])


def note(text):
    """Leave a line that outlives everything: how a test counts lives."""
    with open(os.environ["DIARY"], "a") as diary:
        diary.write(text + "\\n")


step = load()
note(f"began at {step}")
'''

STEADY = (
    PRELUDE
    + """
total, pause = int(os.environ.get("STEPS", "5")), float(os.environ.get("PAUSE", "0.05"))
while step < total:
    time.sleep(pause)
    step += 1
    save(step)
    print(f"step {step}/{total}", flush=True)
note("finished")
"""
)

SAVES_ON_SIGTERM = (
    PRELUDE
    + """
def leave(number, frame):
    save(step)
    note(f"saved {step} on signal")
    sys.exit(0)

signal.signal(signal.SIGTERM, leave)
while True:
    time.sleep(0.05)
    step += 1
    print(f"step {step}", flush=True)
"""
)

CRASHES = PRELUDE + "print('about to fail', flush=True)\nraise RuntimeError('no such layer')\n"

DEAF_WITH_DAEMONS = (
    PRELUDE
    + """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for fd in (0, 1, 2):
                os.close(fd)
            while True:
                time.sleep(1)
        os._exit(0)
save(1)
print("step 1", flush=True)
while True:
    time.sleep(1)
"""
)
