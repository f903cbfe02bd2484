"""The Engine protocol between processes: msgpack over ZeroMQ."""
