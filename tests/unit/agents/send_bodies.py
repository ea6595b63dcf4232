"""A client process: sends files as bodies, prints the status of each answer. python send_bodies.py URL KEY FILE..."""

import sys
import urllib.error
import urllib.request

url, key, *files = sys.argv[1:]
for file in files:
    with open(file, "rb") as body:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        request = urllib.request.Request(url, body.read(), headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as reply:
            print(reply.status)
    except urllib.error.HTTPError as error:
        print(error.code)
