"""Where jobs run: here, in processes, or on a Ray cluster, behind one interface with `concurrent.futures` semantics."""

from linvit.execute.base import EXECUTORS, Executor, executor_type, job_records
from linvit.execute.work import DatasetCache, Job, OnEvent, Probe, StopWork, Tracking, Work, WorkerDied

__all__ = [
    "EXECUTORS",
    "DatasetCache",
    "Executor",
    "Job",
    "OnEvent",
    "Probe",
    "StopWork",
    "Tracking",
    "Work",
    "WorkerDied",
    "executor_type",
    "job_records",
]
