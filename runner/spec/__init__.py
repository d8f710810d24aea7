"""The job spec: YAML in, a validated and frozen JobSpec out, or every problem at once with its place."""

from runner.spec.doubts import doubts
from runner.spec.load import load_spec, problem_at, spec_from_text
from runner.spec.model import (
    Backoff,
    Cache,
    Checkpoints,
    Data,
    Ending,
    Interruption,
    JobSpec,
    Keep,
    Limits,
    Logs,
    Metrics,
    Nodes,
    Notify,
    Price,
    Progress,
    Restart,
    Slowdown,
    Stop,
    Storage,
    StorageOptions,
    usual_cache_dir,
)
from runner.spec.needs import unmet_needs, unmet_store_needs
from runner.spec.not_yet import not_yet
from runner.spec.problems import Problem, SpecInvalid
from runner.spec.schema import schema

__all__ = [
    "Backoff",
    "Cache",
    "Checkpoints",
    "Data",
    "Ending",
    "Interruption",
    "JobSpec",
    "Keep",
    "Limits",
    "Logs",
    "Metrics",
    "Nodes",
    "Notify",
    "Price",
    "Problem",
    "Progress",
    "Restart",
    "Slowdown",
    "SpecInvalid",
    "Stop",
    "Storage",
    "StorageOptions",
    "doubts",
    "load_spec",
    "not_yet",
    "problem_at",
    "schema",
    "spec_from_text",
    "unmet_needs",
    "unmet_store_needs",
    "usual_cache_dir",
]
