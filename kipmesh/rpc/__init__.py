"""The edge to gRPC: the only place that knows protobuf messages. `codec` translates, `server` serves, `client` calls."""
