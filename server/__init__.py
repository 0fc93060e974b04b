"""The server: a front process, a worker process a session, and what they say to each other.

`topkd.server.front.serve(config)` runs a server on one device, `topkd.server.fleet.serve_fleet(config)` one on each of
several; `topkd.server.config.ServerConfig` holds its options. The front and
every module that it imports load neither torch nor CUDA; `topkd.server.worker` is a process of its own and loads both.
May import `topkd.v1`, `topkd.kernels` (workers only) and `topkd._paths`.
"""
