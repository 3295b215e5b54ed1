"""Requests: what a user can ask for, one class per verb. A new option is one field of one of them."""

from __future__ import annotations

from linvit.requests import bench
from linvit.requests.base import BY_VERB, Request, read_request
from linvit.requests.training import CompareRequest, ConvertRequest, TrainRequest, TuneRequest
from linvit.requests.using import (
    AdviseRequest,
    EvaluateRequest,
    ExportRequest,
    JobRequest,
    ListRequest,
    PredictRequest,
    PublishRequest,
    ReportRequest,
    ReproduceRequest,
    SampleRequest,
)

__all__ = [
    "BY_VERB",
    "AdviseRequest",
    "CompareRequest",
    "ConvertRequest",
    "EvaluateRequest",
    "ExportRequest",
    "JobRequest",
    "ListRequest",
    "PredictRequest",
    "PublishRequest",
    "ReportRequest",
    "ReproduceRequest",
    "Request",
    "SampleRequest",
    "TrainRequest",
    "TuneRequest",
    "bench",
    "read_request",
]
