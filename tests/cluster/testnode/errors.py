"""What can go wrong around the node, as one line for a person.

NodeError
├── Missing      this machine lacks something that the node needs: a reason to skip
└── Broken       a step failed although everything was there: a reason to look
"""


class NodeError(Exception):
    """Anything that keeps the node from being built or started."""


class Missing(NodeError):
    """Something that this machine does not have: root, Go, a package registry."""


class Broken(NodeError):
    """A build or a program of the node failed."""
