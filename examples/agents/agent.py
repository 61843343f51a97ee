"""A program that knows a base URL, a key and a task, and nothing of rlx: it asks for the word backwards and writes what it was told."""

import json
import os
import urllib.request

body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": os.environ["TASK"]}]}
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
asked = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", json.dumps(body).encode(), headers)
with urllib.request.urlopen(asked) as answer, open("answer.txt", "w", encoding="utf-8") as file:
    file.write(json.load(answer)["choices"][0]["message"]["content"])
