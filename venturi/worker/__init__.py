"""The worker: claims jobs, runs their handlers on threads, and records how they ended."""

from venturi.worker.settings import WorkOptions
from venturi.worker.worker import Worker

__all__ = ["WorkOptions", "Worker"]
