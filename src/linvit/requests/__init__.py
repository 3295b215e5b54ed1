"""Requests: what a user can ask for, one class per verb. A new option is one field of one of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from linvit.requests.base import Flag, Request, option
from linvit.requests.bench import (
    AngleRequest,
    DepthRequest,
    ErrorRequest,
    FeaturesRequest,
    MapsRequest,
    MemoryRequest,
    SpeedRequest,
)
from linvit.requests.training import CompareRequest, ConvertRequest, TrainRequest, TuneRequest
from linvit.requests.using import (
    AdviseRequest,
    EvaluateRequest,
    ExportRequest,
    JobRequest,
    ListRequest,
    PredictRequest,
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
    "Flag",
    "JobRequest",
    "ListRequest",
    "PredictRequest",
    "ReportRequest",
    "ReproduceRequest",
    "Request",
    "SampleRequest",
    "TrainRequest",
    "TuneRequest",
    "option",
    "read_request",
]

BY_VERB: dict[str, type[Request]] = {
    kind.verb: kind
    for kind in (
        TrainRequest,
        CompareRequest,
        TuneRequest,
        ConvertRequest,
        EvaluateRequest,
        PredictRequest,
        SampleRequest,
        ExportRequest,
        ReportRequest,
        JobRequest,
        ListRequest,
        ReproduceRequest,
        AdviseRequest,
        ErrorRequest,
        FeaturesRequest,
        DepthRequest,
        AngleRequest,
        MapsRequest,
        SpeedRequest,
        MemoryRequest,
    )
}


def read_request(stored: Mapping[str, Any]) -> Request:
    """The request that a document stores."""
    values = dict(stored)
    return BY_VERB[values.pop("verb")].of(**values)
