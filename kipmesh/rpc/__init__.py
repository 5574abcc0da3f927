"""The edge to gRPC, the only place that knows protobuf: `codec` translates, `server` serves, `client` calls."""
