"""A stdio MCP server in plain Python, run inside a sandbox; on the host, a tap that writes down what passes.

`python mcp_server.py` serves. At end of input it says on stderr the sha256 of every byte it read and wrote.
`python mcp_server.py --tap DIR CMD...` runs CMD between our stdin and stdout; DIR/up and DIR/down get the same bytes.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading

TOOLS = [
    {"name": "echo", "description": "Says it back", "inputSchema": {"type": "object"}},
    {"name": "large", "description": "Many characters", "inputSchema": {"type": "object"}},
]
LETTERS = 'aé漢🎉\u2028\u0085\x7f\n"\\'


def large(count: int) -> str:
    return (LETTERS * (count // len(LETTERS) + 1))[:count]


def answer(method: str, given: dict) -> dict | None:
    if method == "initialize":
        version = given["protocolVersion"]
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": {"name": "in", "version": "1"}}
    if method == "tools/list":
        return {"tools": TOOLS}
    if method == "tools/call":
        arguments = given.get("arguments") or {}
        text = arguments["text"] if given["name"] == "echo" else large(arguments["count"])
        return {"content": [{"type": "text", "text": text}], "isError": False}
    return {} if method == "ping" else None


def serve() -> None:
    read, written = hashlib.sha256(), hashlib.sha256()

    def send(message: dict) -> None:
        data = json.dumps({"jsonrpc": "2.0", **message}, ensure_ascii=False).encode() + b"\n"
        written.update(data)
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()

    for line in sys.stdin.buffer:
        read.update(line)
        message = json.loads(line)
        if "method" not in message or "id" not in message:
            continue
        if message["method"] == "tools/call":
            token = (message["params"].get("_meta") or {}).get("progressToken")
            if token is not None:
                params = {"progressToken": token, "progress": 0.5, "total": 1.0}
                send({"method": "notifications/progress", "params": params})
        result = answer(message["method"], message.get("params") or {})
        if result is None:
            send({"id": message["id"], "error": {"code": -32601, "message": message["method"]}})
        else:
            send({"id": message["id"], "result": result})
    sys.stderr.write(json.dumps({"read": read.hexdigest(), "written": written.hexdigest()}) + "\n")
    sys.stderr.flush()
    sys.exit(7)


def tap(directory: str, argv: list[str]) -> int:
    """Ends with CMD's exit code, which it also writes to DIR/code."""
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin
    assert process.stdout

    def copy(source: int, target: int, name: str) -> None:
        with open(os.path.join(directory, name), "wb") as record:
            while data := os.read(source, 65536):
                record.write(data)
                record.flush()
                while data:
                    data = data[os.write(target, data) :]
        os.close(target)

    up = threading.Thread(target=copy, args=(0, process.stdin.fileno(), "up"), daemon=True)
    up.start()
    copy(process.stdout.fileno(), 1, "down")
    code = process.wait()
    with open(os.path.join(directory, "code"), "w") as file:
        file.write(str(code))
    return code


if __name__ == "__main__":
    if sys.argv[1:2] == ["--tap"]:
        os._exit(tap(sys.argv[2], sys.argv[3:]))
    serve()
