"""What a pod has recorded, read and told: `source` fetches it, `steps` reads it, the others make something of it.

`life` and `story` explain one request, `perfetto` draws the steps, `frame` shows the pod now. All but `source` are
pure.
"""
