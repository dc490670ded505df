"""The smallest program: one task, one handler, one job.

VENTURI_DATABASE_URL=postgresql://localhost/app python examples/quickstart.py
"""

import threading

import venturi

# A schema of its own, so that the example meets nobody else's jobs. Without a queue of one's own, `venturi.enqueue`,
# `venturi.handler` and `venturi.work` do the same in the schema "venturi".
queue = venturi.Queue("example_quickstart")
done = threading.Event()


# The kind is stored with every job: it stays when the class is renamed or moved.
@venturi.task("mail.welcome")
class Welcome:
    user_id: int
    locale: str = "en"


# The annotation says which task it handles. Returning completes the job, raising has it tried again later.
@queue.handler
def welcome(task: Welcome) -> None:
    print(f"welcome, user {task.user_id} ({task.locale})")
    done.set()


if __name__ == "__main__":
    queue.migrate()  # does nothing when the schema is up to date
    receipt = queue.enqueue(Welcome(7))
    print("enqueued:", receipt.action)

    # A real worker gets no event: it works until SIGTERM or SIGINT.
    report = queue.work(stop=done)
    print("settled:", report.settled)
    queue.close()
