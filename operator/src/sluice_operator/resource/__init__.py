"""The InferenceService as its user writes it: read, checked against the CRD, and typed. Start with `spec.py`.

`manifest.py` reads files with `plain_yaml.py`, and with `schema.py` and `cel.py`, which are pure, judges as the API
server would.
"""
