"""Who waits in which order, and who has waited too long. Start reading at `waiting`, then `lane`, `keyed`, `fair`.

    waiting   the set of waiting requests: what the scheduler sees
    policy    from the configuration's name to an order
    keyed     orders by a key that is constant while a request waits: arrival, work, priority with aging, deadline
    fair      shares of tenants, in a named unit
    lane      the heap beneath them all
    service   what a request still costs: estimates, and lower bounds
    deadlines running requests whose time is up
    timers    requests by the time at which something is due

No order's cost per step grows with the number that waits: a change is O(log n), a pass is paid by what it yields.
"""
