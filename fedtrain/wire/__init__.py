"""Bytes on the wire: frames of the connection, headers of messages, size limits, the protocol's version."""

from .codec import decode, encode, fetch_list
from .frames import CHUNK_BYTES, MESSAGE_BYTES, PROTOCOL

__all__ = ["CHUNK_BYTES", "MESSAGE_BYTES", "PROTOCOL", "decode", "encode", "fetch_list"]
