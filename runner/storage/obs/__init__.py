"""Huawei OBS: requests to a bucket through Huawei's own SDK, the only package that knows it."""
