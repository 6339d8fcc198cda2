"""The wire: generated protobuf and gRPC code (see federation.proto, control.proto)."""
