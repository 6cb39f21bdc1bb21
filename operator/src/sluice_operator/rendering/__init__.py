"""What a spec becomes in the cluster: its objects, the two programs' files and flags. Start with `render.py`.

`files.py` and `pod_template.py` make the pod, `surroundings.py` and `autoscale.py` what lies around it, `kept.py` and
`templates.py` keep what pods were started with, `foreign/` has the other engines. All but `templates` is pure.
"""
