// stdio.cpp: the engine as a process: version 1 of docs/stdio-protocol.md.
#include <iostream>
#include <memory>
#include <set>

#include <unistd.h>

#include "engine.hpp"
#include "session.hpp"

namespace {

class Request {
public:
    explicit Request(const json::Object &fields) : fields_(fields) {}

    const json::Value &at(const std::string &name) const
    {
        const auto found = fields_.find(name);
        if (found == fields_.end()) throw std::runtime_error("the request lacks " + name);
        return found->second;
    }
    std::int64_t number(const std::string &name) const { return at(name).as<std::int64_t>(name); }
    const std::string &text(const std::string &name) const { return at(name).as<std::string>(name); }
    bool flag(const std::string &name) const { return at(name).as<bool>(name); }
    Ids numbers(const std::string &name) const
    {
        Ids values;
        for (const json::Value &one : at(name).as<json::List>(name))
            values.push_back(one.as<std::int64_t>(name));
        return values;
    }
    Tree tree() const { return {numbers("tokens"), numbers("parents")}; }
    Limit limit() const
    {
        const Ids stops = numbers("stop_tokens");
        Limit limit{{stops.begin(), stops.end()}, 0};
        if (!at("max_emitted").is_null()) {
            limit.max_emitted = number("max_emitted");
            if (limit.max_emitted == 0) limit.max_emitted = -1; // refused by the session
        }
        return limit;
    }

private:
    const json::Object &fields_;
};

class Server {
public:
    // The reply's `ok`; tensors for the file of the request are put into `out`.
    json::Object reply(const Request &request, Writer &out)
    {
        const std::string &verb = request.text("verb");
        if (verb == "hello") return hello(request);
        if (verb == "load") return load(request);
        if (verb == "unload") return models_.erase(request.number("model")), json::Object();
        if (verb == "open") return open(request);
        const std::int64_t number = request.number("session");
        Session &session = opened(number);
        if (verb == "close") return close(number);
        return answer(verb, session, request, out);
    }

private:
    static json::Object hello(const Request &request)
    {
        if (request.number("kdtr_stdio") != 1)
            throw Refusal("UnsupportedError", "this engine speaks kdtr_stdio 1");
        return engine_info();
    }

    json::Object load(const Request &request)
    {
        Reader file(request.text("source"), "BundleError");
        models_[request.number("model")] = std::make_shared<const Model>(load_model(file));
        return {};
    }

    json::Object open(const Request &request)
    {
        const auto model = models_.find(request.number("model"));
        if (model == models_.end()) throw Refusal("SessionError", "the model is not loaded");
        sessions_[request.number("session")] =
            std::make_unique<Session>(model->second, request.number("max_len"));
        return {};
    }

    Session &opened(std::int64_t number)
    {
        const auto found = sessions_.find(number);
        if (found == sessions_.end())
            throw Refusal("SessionError", say("session ", number, " is not open; open another"));
        return *found->second;
    }

    json::Object close(std::int64_t number)
    {
        sessions_.erase(number);
        return {};
    }

    static json::Object answer(const std::string &verb, Session &session, const Request &request,
                               Writer &out)
    {
        if (verb == "state")
            return {{"committed_len", json::number(session.committed_len())},
                    {"root", session.root() ? json::number(*session.root()) : json::Value(nullptr)}};
        if (verb == "set_root") return session.set_root(request.number("token")), json::Object();
        if (verb == "reset") return session.reset(), json::Object();
        if (verb == "snapshot") return session.snapshot(out, ""), json::Object();
        if (verb == "commit") {
            session.commit({request.numbers("path"), request.number("bonus")});
            return {};
        }
        if (verb == "accept") {
            const bool given = !request.at("targets").is_null();
            const Ids targets = given ? request.numbers("targets") : Ids();
            return fields(session.accept(request.tree(), given ? &targets : nullptr, request.limit()));
        }
        if (verb == "build") {
            Reader in(request.text("in"), "InputError");
            const Tree tree = session.build(in.get("draft_logits"), request.number("budget"));
            return {{"tokens", json::numbers(tree.tokens)}, {"parents", json::numbers(tree.parents)}};
        }
        const Trace trace{request.flag("trace") ? &out : nullptr,
                          [](const std::string &stage, int layer) {
                              return layer < 0 ? "trace/" + stage : say("trace/", stage, "/", layer);
                          }};
        if (verb == "prefill")
            return {{"root", json::number(session.prefill(request.numbers("tokens"), trace))}};
        if (verb == "decode") return {{"root", json::number(session.decode(trace))}};
        if (verb == "verify") {
            const Verified verified = session.verify(request.tree(), trace);
            out.add("logits", verified.logits.shape(), verified.logits.v);
            return {{"targets", json::numbers(verified.targets)}};
        }
        if (verb == "forward_tokens") {
            Reader in(request.text("in"), "InputError");
            const Rows logits = session.forward_tokens(request.numbers("tokens"), in.get("positions"),
                                                       in.get("mask"), trace);
            out.add("logits", logits.shape(), logits.v);
            return {};
        }
        if (verb == "round") {
            const Tree tree = request.tree();
            const Walk done = session.round(tree, request.limit(), trace);
            json::Object ok = fields(done);
            ok["emitted"] = json::numbers(emitted(tree, done));
            return ok;
        }
        throw Refusal("UnsupportedError", "the verb " + verb + " is not offered");
    }

    static json::Object fields(const Walk &walk)
    {
        return {{"path", json::numbers(walk.path)}, {"bonus", json::number(walk.bonus)}};
    }

    std::map<std::int64_t, std::shared_ptr<const Model>> models_; // sessions keep theirs alive
    std::map<std::int64_t, std::unique_ptr<Session>> sessions_;
};

json::Object error(const std::string &kind, const std::string &text)
{
    return {{"class", json::text(kind)}, {"text", json::text(text)}};
}

// One line to `to`, whole.
bool send(int to, const std::string &line)
{
    for (std::size_t at = 0; at < line.size();) {
        const ssize_t n = ::write(to, line.data() + at, line.size() - at);
        if (n < 0) return false;
        at += static_cast<std::size_t>(n);
    }
    return true;
}

} // namespace

int serve()
{
    const int replies = ::dup(1);
    ::dup2(2, 1); // what a library prints to stdout goes to stderr: replies alone may be there
    Server server;
    for (std::string line; std::getline(std::cin, line);) {
        json::Object reply;
        Writer out;
        try {
            const json::Value message = json::parse(line);
            const auto &fields = message.as<json::Object>("the request");
            const Request request(fields);
            reply["id"] = request.at("id");
            try {
                reply["ok"] = json::Value(server.reply(request, out));
            } catch (const Refusal &refusal) {
                reply["error"] = json::Value(error(refusal.kind, refusal.what()));
            } catch (const std::bad_alloc &) {
                reply["error"] = json::Value(error("std::bad_alloc", "no memory"));
            } catch (const std::exception &broken) { // CUDA: an error of the device comes here
                reply["error"] = json::Value(error("std::exception", broken.what()));
            }
            if (!out.empty()) { // after an error too: what was traced before it may name the cause
                out.write(request.text("out"));
                reply["wrote"] = json::flag(true);
            }
        } catch (const std::exception &broken) { // no request, or its file cannot be written
            std::cerr << "cpp-engine: " << broken.what() << '\n';
            return 1;
        }
        if (!send(replies, json::dump(json::Value(reply)) + "\n")) return 1;
    }
    return 0;
}
