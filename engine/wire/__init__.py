"""The `Engine` protocol between processes: msgspec msgpack over ZeroMQ. The engine binds, its clients connect."""
