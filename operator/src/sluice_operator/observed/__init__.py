"""What the cluster shows of a service, and what stands in its pods' way, in plain words. Pure. Start with `pods`."""
