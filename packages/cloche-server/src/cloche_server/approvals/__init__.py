"""Questions that wait, bounded, for a person.

Words used here:
    question   one action of a sandbox that a rule marks `ask`, with the target that was resolved for it
    answer     approve or deny, by a person: over the API, the command line, or a one-time token that a webhook was given
    verdict    what the action is told; anything but an approval is a no
    scope      an approval that also holds for the same host and port from the same sandbox for a while; only where the
               organisation's file allows it, and each use is told anew
    void       a question or scope whose ground is gone: the policy changed, the sandbox ended, the asker left

`queue.py` decides and knows no clock; `asking.Approvals` waits and tells; `webhook.py` tells a server. All is in memory: when the
daemon dies, everything that waits is denied. Deliberately absent: the node, the API, the gate's work (it asks again for
each use), a default that says yes. Sockets are opened in `webhook.py` only.
"""
