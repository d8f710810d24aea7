"""Buckets that speak S3: AWS, and the many that answer like it."""

from __future__ import annotations

from runner.storage.s3.bucket import S3Bucket

__all__ = ["S3Bucket"]
