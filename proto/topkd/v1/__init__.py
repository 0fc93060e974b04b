"""The protocol topkd.v1: .proto files and the code generated from them. May import nothing of topkd but itself."""
