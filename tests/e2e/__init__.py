"""Whole servers and whole clients, each a process of its own, over real sockets.

May import everything of topkd that a user can. What is wrong on purpose is sent by `raw`, which knows nothing of the
client library.
"""
