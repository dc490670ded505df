"""What a second enqueue of the same dedup key does while the first job waits: two recipes.

Debounce: a document that is saved ten times in a row is indexed once, some time after the last save.
Union: notifications for one user that come close together become one mail that holds them all.
"""

import datetime as dt
import threading

import venturi

queue = venturi.Queue("example_merge")
QUIET = dt.timedelta(milliseconds=300)
handled: list[str] = []
done = threading.Event()


@venturi.task("document.index")
class IndexDocument:
    document: int
    version: int

    def dedup_key(self) -> int:
        return self.document

    def merge(self, existing: "venturi.Pending[IndexDocument]") -> "venturi.Merge[IndexDocument]":
        # Without a delay Replace keeps the earlier of the two times; with one each save moves the run away.
        return venturi.Replace(delay=QUIET)


@venturi.task("user.notify")
class Notify:
    user: str
    messages: tuple[str, ...]

    def dedup_key(self) -> str:
        return self.user

    def merge(self, existing: "venturi.Pending[Notify]") -> "venturi.Merge[Notify]":
        # The time of the first one stays, so that a steady stream of messages cannot put the mail off for ever.
        return venturi.Combine(Notify(self.user, existing.task.messages + self.messages))


def note(line: str) -> None:
    handled.append(line)
    if len(handled) == 2:
        done.set()


@queue.handler
def index_document(task: IndexDocument) -> None:
    note(f"indexed document {task.document}, version {task.version}")


@queue.handler
def notify(task: Notify) -> None:
    note(f"mailed {task.user}: {', '.join(task.messages)}")


if __name__ == "__main__":
    queue.migrate()
    saves = [queue.enqueue(IndexDocument(7, version), delay=QUIET).action for version in (1, 2, 3)]
    mails = [queue.enqueue(Notify("ada", (text,)), delay=QUIET).action for text in ("hello", "news")]
    print("saves:", *saves)
    print("mails:", *mails)
    queue.work(stop=done)
    print(*sorted(handled), sep="\n")
    queue.close()
