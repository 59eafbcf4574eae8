// The table of versions; promote and roll back go through /admin, with the key its operator types here. Each route has a version
// in service: where there are several, the table names them and each is rolled back from its own row.
import { $, clock, el, figure, fill, percent, say } from "./dom.js";
import { sentence } from "./playground.js";

const NUM_SHOWN = 8;
const STATUS = {
  in_service: "in service",
  canary: "canary",
  candidate: "candidate",
  retired: "retired",
  rejected: "rejected",
  rolled_back: "rolled back",
  imported: "imported",
  set_aside: "set aside",
};

const isServing = (row) => row.status === "in_service";

export class Versions {
  constructor() {
    this.rows = [];
    this.details = {};
    this.showsAll = false;
    this.pending = null;
    $("more-versions").addEventListener("click", () => {
      this.showsAll = true;
      this.draw();
    });
    $("rollback").addEventListener("click", () => this.askRollback(this.rows.find(isServing)?.route ?? "default"));
    $("confirm-cancel").addEventListener("click", () => $("confirm").close());
    $("confirm").querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.act();
    });
  }

  follow(details) {
    this.details = details;
    this.rows = details.versions;
    this.draw();
  }

  draw() {
    const { has_admin_key: hasKey, keeps_state: keepsState } = this.details;
    const isEmpty = !this.rows.length;
    $("versions").hidden = isEmpty;
    const hasRoutes = new Set(this.rows.map((row) => row.route)).size > 1;
    $("rollback").hidden = isEmpty || hasRoutes;
    $("versions-route").hidden = !hasRoutes;
    $("rollback").disabled = !hasKey;
    const note = !keepsState
      ? "Nothing is kept: this server has no state folder, so there are no versions to choose from."
      : isEmpty
        ? "No version yet. The first is the untrained draft; better ones follow when learning is on."
        : hasKey
          ? ""
          : "To promote or roll back from here, start the server with --admin-key.";
    say("versions-note", note);
    $("versions-note").hidden = !note;
    const rows = this.showsAll ? this.rows : this.rows.filter((row, index) => index < NUM_SHOWN || isServing(row) || row.status === "canary");
    $("more-versions").hidden = rows.length === this.rows.length;
    say("more-versions", `Show all ${this.rows.length}`);
    fill($("versions").tBodies[0], [rows, hasKey, hasRoutes], () => rows.map((row) => this.row(row, hasKey, hasRoutes)));
  }

  row(row, hasKey, hasRoutes) {
    const action = el("td");
    if (hasRoutes && this.leavesNext(row)) {
      const button = el("button", { type: "button", "aria-label": `Roll back route ${row.route}` }, "Roll back…");
      button.disabled = !hasKey;
      button.addEventListener("click", () => this.askRollback(row.route, ` route ${row.route}`));
      action.append(button);
    }
    if (row.can_serve && !isServing(row)) {
      const button = el("button", { type: "button", "aria-label": `Promote ${row.id}` }, "Promote…");
      button.disabled = !hasKey;
      button.addEventListener("click", () =>
        this.ask({
          title: `Promote ${row.id}?`,
          text: "It serves all requests at once and is watched against the version it replaces. Answers stay the same; only speed changes.",
          verb: "Promote",
          path: `admin/drafts/${encodeURIComponent(row.id)}/promote`,
        }),
      );
      action.append(button);
    }
    const parent = row.parent_alpha == null ? "" : ` against ${figure(row.parent_alpha)}`;
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, row.id),
      ...(hasRoutes ? [el("td", {}, row.route)] : []),
      el("td", {}, el("span", { class: `status ${row.status}` }, STATUS[row.status] ?? row.status)),
      el("td", {}, row.alpha == null ? "–" : figure(row.alpha) + parent, ...(row.reason ? [el("small", { class: "why" }, row.reason)] : [])),
      el("td", { class: "wide" }, row.live_rate == null ? "–" : percent(row.live_rate)),
      el("td", { class: "wide" }, clock(row.created_at)),
      action,
    );
  }

  /** What a roll-back of the row's route takes out: its canary, or else the version in service. */
  leavesNext(row) {
    const hasCanary = this.rows.some((other) => other.route === row.route && other.status === "canary");
    return hasCanary ? row.status === "canary" : isServing(row);
  }

  askRollback(route, ofRoute = "") {
    this.ask({
      title: `Roll back${ofRoute}?`,
      text: "A canary is withdrawn; without one, the version before the one in service comes back.",
      verb: "Roll back",
      path: `admin/rollback?route=${encodeURIComponent(route)}`,
    });
  }

  ask(pending) {
    this.pending = pending;
    say("confirm-title", pending.title);
    say("confirm-text", pending.text);
    say("confirm-do", pending.verb);
    say("confirm-error", "");
    $("confirm").showModal();
    $($("admin-key").value ? "confirm-do" : "admin-key").focus();
  }

  async act() {
    const button = $("confirm-do");
    button.disabled = true;
    say("confirm-error", "");
    try {
      const headers = { Authorization: `Bearer ${$("admin-key").value}` };
      const response = await fetch(this.pending.path, { method: "POST", headers });
      if (!response.ok) throw new Error(await sentence(response));
      $("confirm").close();
    } catch (error) {
      say("confirm-error", error.message);
    } finally {
      button.disabled = false;
    }
  }
}
