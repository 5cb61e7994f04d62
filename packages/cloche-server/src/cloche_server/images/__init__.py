"""Images: from a name to a root file system that every sandbox of that image shares.

Words: a *reference* names an image (`reference`); a *manifest* lists its config and layers, an *index* the manifests
of several platforms (`manifest`); a *blob* is bytes named by their sha256; a *root* is the EROFS file made from the
layers. `registry` fetches, `store` keeps, `worker` converts in a process of its own, `trust` asks for signatures.

Deliberately absent: the node, the API, the keeper and the engines (the node hands in what is needed), and any path of
the host that an image chose. Only `outbound` and `auth` reach out of the process: sockets, credential helpers.
Everything that a registry or an archive says is hostile until its length, its shape and its hash are checked.
"""
