"""Tinker's wire format: values, messages, protobuf, payloads."""
