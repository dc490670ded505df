"""A worker thread beside a Flask application, and jobs that belong to a request's transaction.

Under a server with several processes each of them needs a worker of its own: see gunicorn_conf.py beside this file.
"""

import os
import signal
import sys
import time
import uuid

import flask
import psycopg

import venturi

# Constructing a queue opens nothing, so that this module may be imported before a server forks.
queue = venturi.Queue("example_flask")
app = flask.Flask(__name__)


@venturi.task("mail.welcome")
class Welcome:
    name: str


@queue.handler
def welcome(task: Welcome, ctx: venturi.Context) -> None:
    # Stands for a slow mail server. A worker that stops waits for its handlers, so that this run is not lost.
    time.sleep(0.05)
    ctx.attach(greeting=f"welcome, {task.name}")


@app.post("/users/<name>")
def sign_up(name: str) -> tuple[dict[str, str], int]:
    # psycopg commits at the end of the block, or rolls back when the view raises: user and job, or neither.
    with psycopg.connect(os.environ.get("VENTURI_DATABASE_URL", "")) as conn:
        conn.execute("CREATE TEMPORARY TABLE users (name text CHECK (name <> 'nobody')) ON COMMIT DROP")
        receipt = queue.enqueue(Welcome(name), conn=conn)
        conn.execute("INSERT INTO users VALUES (%s)", (name,))
    return {"job": str(receipt.id)}, 202


@app.get("/jobs/<uuid:id>")
def show_job(id: uuid.UUID) -> dict[str, str]:
    job = queue.job(id)
    if job is None:
        flask.abort(404)
    return {"status": job.status}


if __name__ == "__main__":
    queue.migrate()
    # app.run() and waitress leave SIGTERM to Python, which would end the process at once.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    # One process, so that one worker beside it is enough: it stops, in order, at the end of the block.
    with queue.work(block=False) as worker:
        print(f"working: {worker.settings.concurrency} slots")
        client = app.test_client()  # in earnest: app.run()
        print("nobody:", client.post("/users/nobody").status_code)
        answer = client.post("/users/ada")
        print("ada:", answer.status_code)
        job = "/jobs/" + answer.get_json()["job"]
        while client.get(job).get_json()["status"] != "completed":
            time.sleep(0.01)
        print("welcome sent")
    queue.close()
