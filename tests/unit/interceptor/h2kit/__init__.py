"""Programs that run in the interceptor's environment, which has h2: a server and a client of HTTP/2."""
