"""The conditions of an InferenceService: `view.py` is one look at it, each other file what a part claims.

Start with `view.py`, then `serving.py` (Ready, Available, Progressing), `model.py` (ModelLoaded, Degraded),
`promise.py` (SLOFeasible, SLOMet, AdmissionOpen), `around.py` (MonitoringReady, Autoscaling) and `tools.py`
(Reconciling, Stalled). Everything here is pure.
"""
