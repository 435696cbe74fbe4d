// An OpenID provider for tests. Its argument is JSON: port, client_id, client_secret, redirect_uris,
// post_logout_redirect_uris, and the claims of each account.
//
// Whoever types the name of an account is logged in as it. `POST /tamper` changes claims of the next
// ID token ({"nonce": "x"}; null removes one) and signs it again; with {"key": "new"}, with a new
// key.
import { exportJWK, generateKeyPair, importJWK, SignJWT } from "jose";
import Provider from "oidc-provider";

const { port, accounts, ...client } = JSON.parse(process.argv[2]);

async function key(kid) {
  const { privateKey } = await generateKeyPair("ES256", { extractable: true });
  return { ...(await exportJWK(privateKey)), kid, alg: "ES256", use: "sig" };
}

const first = await key("first");
const published = [];
let tampering = null;

const provider = new Provider(`http://127.0.0.1:${port}`, {
  jwks: { keys: [first] },
  clients: [{ id_token_signed_response_alg: "ES256", ...client }],
  cookies: { keys: ["the cookies of these tests"] },
  pkce: { required: () => true },
  claims: { openid: ["sub"], email: ["email", "email_verified"], profile: ["groups"] },
  findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id, ...accounts[id] }) }),
  async loadExistingGrant(ctx) {
    const grant = new ctx.oidc.provider.Grant({
      clientId: ctx.oidc.client.clientId, accountId: ctx.oidc.session.accountId,
    });
    grant.addOIDCScope("openid email profile");
    await grant.save();
    return grant;
  },
  features: {
    devInteractions: { enabled: false },
    rpInitiatedLogout: {
      enabled: true,
      logoutSource: (ctx, form) => {
        ctx.body = page(`${form}<button form="op.logoutForm" name="logout" value="yes">Leave</button>`);
      },
    },
  },
});

const page = (content) =>
  `<!doctype html><html lang="en"><title>Provider</title><link rel="icon" href="data:,">${content}`;

async function body(request) {
  let text = "";
  for await (const part of request) text += part;
  return text;
}

provider.use(async (ctx, next) => {
  if (ctx.path === "/tamper") {
    tampering = JSON.parse(await body(ctx.req));
    ctx.status = 204;
  } else if (ctx.path.startsWith("/interaction/") && ctx.method === "GET") {
    ctx.type = "html";
    ctx.body = page(`<form method="post"><label>Account <input name="login"></label><button>Enter</button></form>`);
  } else if (ctx.path.startsWith("/interaction/")) {
    const accountId = new URLSearchParams(await body(ctx.req)).get("login");
    const result = accountId ? { login: { accountId } } : { error: "access_denied" };
    ctx.redirect(await provider.interactionResult(ctx.req, ctx.res, result));
  } else {
    await next();
    if (ctx.path === "/jwks") ctx.body = { keys: [...ctx.body.keys, ...published] };
    if (ctx.path === "/token" && ctx.body?.id_token && tampering) {
      ctx.body = { ...ctx.body, id_token: await tampered(ctx.body.id_token) };
      tampering = null;
    }
  }
});

async function tampered(token) {
  const { key: other, ...changes } = tampering;
  const claims = { ...JSON.parse(Buffer.from(token.split(".")[1], "base64url")), ...changes };
  for (const name of Object.keys(claims)) if (claims[name] === null) delete claims[name];
  const signing = other ? await key(other) : first;
  if (other) {
    const { d: _, ...shown } = signing;
    published.push(shown);
  }
  return new SignJWT(claims)
    .setProtectedHeader({ alg: "ES256", kid: signing.kid })
    .sign(await importJWK(signing, "ES256"));
}

provider.listen(port, "127.0.0.1");
